"""Run single tokens through a model with KV caches. On a GPU, every token replays the same CUDA graph.

The graph reads the token, the position and the cache length from fixed addresses in GPU memory.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from ringattn import KVCache
from ringattn.train.inference.layer_cache import decode, places
from ringattn.train.model.gpt import GPT, Finish
from ringattn.train.parallel.shard import local_shard

# The largest fraction of the free GPU memory for the copy of the weights
MAX_FRACTION = 0.8


class TokenStep:
    """Runs one token through the model and appends its keys and values to the caches.

    Args:
        model: its parameters are not sharded.
        caches: one local cache per layer, with the tokens of the prompt.
        finish: maps the last hidden states to the result, as in `GPT.forward`.
        backend: as in `decode_attention`.
    """

    def __init__(self, model: GPT, caches: Sequence[KVCache], finish: Finish, backend: str) -> None:
        self.model, self.caches, self.finish, self.backend = model, caches, finish, backend
        device = model.embedding.device
        self.token = torch.zeros(1, 1, dtype=torch.int64, device=device)
        self.position = torch.zeros(1, dtype=torch.int64, device=device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.result: Tensor | None = None  # the memory to which every replay writes the result of `finish`

    def __call__(self, token: int, position: int) -> Tensor:
        """Process `token` at `position`, and return the result of `finish`. The next call overwrites the result."""
        self.token.fill_(token)
        self.position.fill_(position)
        if self.graph is None:
            return self._run()
        self.graph.replay()
        assert self.result is not None
        return self.result

    def capture(self, position: int) -> None:
        """Capture the step in a CUDA graph. The capture overwrites the caches at `position`, the position of the next token."""
        # Run the step once, because kernels cannot be compiled during a capture. The default stream cannot be captured.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.position.fill_(position)
            self._run()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, stream=stream):
                self.result = self._run()
        torch.cuda.current_stream().wait_stream(stream)

    def _run(self) -> Tensor:
        # Local caches of equal size store a token in the same row, so compute the row once per step.
        place = places(self.caches, self.position)
        options = dict(window=None, group=None, backend=self.backend)
        attend = [partial(decode, cache=cache, place=place[cache.capacity], **options) for cache in self.caches]
        return self.model(self.token, self.position, attend, self.finish)


def copy_for_one_rank(model: GPT, dtype: torch.dtype, device: torch.device) -> GPT | None:
    """Return a copy of the model with the given dtype and device. Return None if the copy needs too much GPU memory. The job
    must have one rank.
    """
    weights = {name: local_shard(x) for name, x in model.state_dict().items()}
    copied = sum(x.numel() for x in weights.values() if (x.dtype, x.device) != (dtype, device)) * dtype.itemsize
    if device.type == "cuda" and copied > MAX_FRACTION * torch.cuda.mem_get_info()[0]:
        return None
    with torch.device("meta"):
        copy = GPT(model.config, model.embedding.shape[0])
    copy.load_state_dict({name: x.detach().to(device, dtype) for name, x in weights.items()}, assign=True)
    return copy
