"""What stands behind TRL's client of a vLLM server in the tests: a model of its own on this CPU.

Everything of TRL runs: how it sends weights, asks for completions and corrects for the other
log-probabilities of the engine. vLLM itself needs a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from transformers import PreTrainedModel
from trl.experimental.online_dpo import online_dpo_trainer
from trl.generation import vllm_generation

from tests.support.trl.dpo import tokenizer


class Client:
    """Takes the place of `trl.generation.vllm_client.VLLMClient`.

    Args:
        model: has the architecture of the policy. Its weights are those that TRL sends.
    """

    def __init__(self, model: PreTrainedModel):
        self.model = model.eval()
        self.updates: list[dict[str, torch.Tensor]] = []
        self._tokenizer = tokenizer()
        self._random = torch.Generator().manual_seed(0)

    def init_communicator(self, device: torch.device) -> None:
        pass

    def reset_prefix_cache(self) -> None:
        pass

    def get_server_info(self) -> dict:
        return {"model_config": {"logprobs_mode": "processed_logprobs"}}

    def update_named_params(self, metadata: list, params: Iterable[tuple[str, torch.Tensor]]) -> None:
        with self.weight_update():
            for name, x in params:
                self.update_named_param(name, x)
        sent = self.updates[-1]
        assert [(name, str(x.dtype).removeprefix("torch."), list(x.shape)) for name, x in sent.items()] == metadata

    @contextmanager
    def weight_update(self) -> Iterator[None]:
        self.updates.append({})
        yield
        self.model.load_state_dict(self.updates[-1])  # with exactly the names of the model

    def update_named_param(self, name: str, weights: torch.Tensor) -> None:
        self.updates[-1][name] = weights.detach().clone()

    @torch.no_grad()
    def generate(
        self, prompts: list[list[int] | str], *, n: int, max_tokens: int, temperature: float, **options
    ) -> dict:
        """Samples one token at a time. The engine's log-probabilities differ from those of the
        policy, as those of vLLM's kernels do.
        """
        completions, logprobs = [], []
        ends = self.model.generation_config.eos_token_id
        for prompt in (prompt for prompt in prompts for _ in range(n)):
            start = (
                self._tokenizer(prompt, add_special_tokens=False)["input_ids"] if isinstance(prompt, str) else prompt
            )
            ids, scores = list(start), []
            while len(scores) < max_tokens and (not scores or ids[-1] not in ends):
                logps = (self.model(torch.tensor([ids])).logits[0, -1].float() / temperature).log_softmax(-1)
                ids.append(int(torch.multinomial(logps.exp(), 1, generator=self._random)))
                scores.append([float(logps[ids[-1]] + 0.2 * torch.randn((), generator=self._random))])
            completions.append(ids[len(start) :])
            logprobs.append(scores)
        return {"prompt_ids": prompts, "completion_ids": completions, "logprobs": logprobs}


def serve(monkeypatch: pytest.MonkeyPatch, make_model: Callable[[], PreTrainedModel]) -> list[Client]:
    """Starts a server for each trainer that asks for one. Returns their clients, in that order."""
    clients: list[Client] = []

    def connect(**address) -> Client:
        clients.append(Client(make_model()))
        return clients[-1]

    for module in (vllm_generation, online_dpo_trainer):
        monkeypatch.setattr(module, "is_vllm_available", lambda: True)
        monkeypatch.setattr(module, "VLLMClient", connect)
    monkeypatch.setattr(online_dpo_trainer, "SamplingParams", SimpleNamespace, raising=False)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cpu"))
    return clients
