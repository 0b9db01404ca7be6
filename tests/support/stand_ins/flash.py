"""A stand-in for the package flash-attn in transformers' models."""

import pytest
import torch
import torch.nn.functional as F
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registers scaled dot-product attention as "flash_attention_2".

    It takes the 2-D mask that transformers passes to flash attention.
    """

    def attend(module, query, key, value, attention_mask, scaling=None, **kwargs):
        # transformers looks up the functions of flash-attn by this name.
        assert module.config._attn_implementation == "flash_attention_2"
        n_q, n_k = query.shape[2], key.shape[2]
        visible = torch.ones(n_q, n_k, dtype=torch.bool).tril(n_k - n_q)[None, None]
        if attention_mask is not None:
            assert attention_mask.dim() == 2
            visible = visible & attention_mask[:, None, None].bool()
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=visible, scale=scaling, enable_gqa=True)
        return out.nan_to_num().transpose(1, 2), None

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "flash_attention_2", attend)
    monkeypatch.setattr(PreTrainedModel, "_check_and_adjust_attn_implementation", lambda self, name, **options: name)
