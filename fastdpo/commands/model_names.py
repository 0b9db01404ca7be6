"""The models that commands take: directories, and names of the Hugging Face Hub."""

from __future__ import annotations

from pathlib import Path

from ..checks import shown

CONFIG = "config.json"
CLASSIFIER = "ForSequenceClassification"
"""How the names of the classes of reward models end."""


def require_model(op: str, model: str) -> None:
    """Requires a model whose configuration can be read.

    Args:
        op: the command, for its error message.
        model: path of a directory with a config.json, or a name on the Hub. What is in its cache is not
            asked for.

    Raises:
        ValueError: there is no such model, or the Hub cannot say.
    """
    path = Path(model)
    if (path / CONFIG).is_file():
        return
    reason = "which has none" if path.exists() else _described_as_missing(model)
    if reason is not None:
        rule = f"be a directory with a {CONFIG}, or the name of a model on the Hugging Face Hub"
        raise ValueError(f"{op}: model must {rule}; got {shown(model)}, {reason}")


def is_reward_model(op: str, model: str) -> bool:
    """Whether a model that can be read is a reward model: a sequence classifier with one label.

    Args:
        op, model: as for `require_model`.

    Raises:
        ValueError: it is a sequence classifier with several labels.
    """
    from transformers import PretrainedConfig

    config, _ = PretrainedConfig.get_config_dict(model)
    architecture = (config.get("architectures") or [""])[0]
    if not architecture.endswith(CLASSIFIER):
        return False
    labels = PretrainedConfig.from_dict({"id2label": config.get("id2label")}).num_labels
    if labels != 1:
        rule = "be a causal LM, or a sequence classifier with one label"
        raise ValueError(f"{op}: model must {rule}; got {shown(model)}, a {architecture} with {labels} labels")
    return True


def _described_as_missing(name: str) -> str | None:
    """Why the Hub and its cache do not have a model, or None if they do."""
    from huggingface_hub import file_exists, try_to_load_from_cache
    from huggingface_hub.utils import HFValidationError

    try:
        if isinstance(try_to_load_from_cache(name, CONFIG), str) or file_exists(name, CONFIG):
            return None
    except HFValidationError:
        return "which is neither"
    except Exception as error:  # of the HTTP client, which depends on the version of huggingface_hub
        return f"which is no directory, and the Hub cannot be asked: {error}"
    return f"which is no directory, and the Hub has no {CONFIG} of that name"
