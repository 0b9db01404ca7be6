"""Makes tensors in Triton's interpreter fast.

The result of each operation gets objects of its own for its shape and its size, and for their types, which takes
longer than most operations. Here tensors of the same type share them.
"""

from triton.language import core


def install(monkeypatch) -> None:
    make_type, make_tensor = core.block_type.__init__, core.tensor.__init__
    of_types: dict[tuple, tuple] = {}
    of_tensors: dict[str, tuple] = {}

    def make_type_of_known_shape(block, element_ty, shape):
        key = (str(element_ty), *(x.value if isinstance(x, core.constexpr) else x for x in shape))
        if key not in of_types:
            make_type(block, element_ty, shape)
            of_types[key] = block.shape, block.numel, block.name
        block.element_ty = element_ty
        block.shape, block.numel, block.name = of_types[key]

    def make_tensor_of_known_shape(tensor, handle, type):
        key = type.name if type.is_block() else ""
        if key not in of_tensors:
            make_tensor(tensor, handle, type)
            of_tensors[key] = tensor.shape, tensor.numel
        tensor.handle, tensor.type, tensor.dtype = handle, type, type.scalar
        tensor.shape, tensor.numel = of_tensors[key]

    monkeypatch.setattr(core.block_type, "__init__", make_type_of_known_shape)
    monkeypatch.setattr(core.tensor, "__init__", make_tensor_of_known_shape)
