"""The runner on torch: a step plan in, sampled ids out."""

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from kimi_runtime.engine.plan import Row, RowsFailed, Sampled, StepPlan
from kimi_runtime.engine.sampler import RequestSampler
from kimi_runtime.errors import CapacityError, KimistackError, RequestError
from kimi_runtime.models.cache import KvCache
from kimi_runtime.models.k2 import K2Model
from kimi_runtime.models.rows import padded_rows
from kimi_runtime.models.weights import ModelWeights
from kimi_runtime.spec.model import ModelSpec
from kimi_runtime.transfer.memory import Memory
from kimi_runtime.units import format_bytes

_LAYER_GROUPS = 4
_KV_BYTES = 2  # bf16


class NonFiniteLogits(KimistackError):
    """A request's logits have NaN or infinity in them: no id can be drawn from them (HTTP 500)."""


def kv_block_bytes(spec: ModelSpec, block_tokens: int) -> int:
    """Bytes of one KV block of the bf16 cache, all layers."""
    return spec.layers * block_tokens * spec.kv_row_dim * _KV_BYTES


class TorchRunner:
    """`engine.plan.Runner` for one process and the CPU's memory.

    The KV pool lives in `memory`, block by block ([block][layer][token][row], bf16), so that other
    processes can map it. `threads` is set for the whole process: which products are invariant is
    measured for that number, once, here.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: ModelWeights,
        *,
        blocks: int,
        block_tokens: int,
        memory: Memory,
        threads: int = 1,
        vocabulary_size: int | None = None,
    ) -> None:
        """`vocabulary_size`: ids from it on are in no vocabulary table and never drawn."""
        self._threads = threads
        self._set_threads()
        self.spec, self.model_digest = spec, weights.digest
        self.blocks, self.block_tokens = blocks, block_tokens
        self._drawable = min(vocabulary_size or spec.vocab_size, spec.vocab_size)
        need = blocks * self.block_bytes
        if memory.size_bytes < need:
            raise CapacityError(
                f"a KV pool of {blocks} blocks of {block_tokens} tokens",
                need=format_bytes(need),
                have=format_bytes(memory.size_bytes),
                where=str(memory.path or "private memory"),
                fix="lower the number of blocks or raise limits.kv_bytes",
            )
        self._view = memory.view[:need]
        pool = torch.frombuffer(self._view, dtype=torch.bfloat16)
        shape = (blocks, spec.layers, block_tokens, spec.kv_row_dim)
        self._cache = KvCache(pool.view(shape))
        self.model = K2Model(spec, weights.tensors)
        self._builder = self.model.step_builder(self._cache)

    @property
    def block_bytes(self) -> int:
        """Bytes of one KV block, all layers."""
        return kv_block_bytes(self.spec, self.block_tokens)

    @property
    def layer_group_bytes(self) -> tuple[int, ...]:
        """Up to four groups of consecutive layers, as even as they can be."""
        layers, groups = self.spec.layers, min(_LAYER_GROUPS, self.spec.layers)
        return tuple(
            ((i + 1) * layers // groups - i * layers // groups) * self._layer_bytes
            for i in range(groups)
        )

    @property
    def _layer_bytes(self) -> int:
        return self.block_bytes // self.spec.layers

    def block(self, number: int) -> memoryview:
        """The writable bytes of a KV block."""
        if not 0 <= number < self.blocks:
            raise IndexError(f"block {number} of {self.blocks}")
        return self._view[number * self.block_bytes : (number + 1) * self.block_bytes]

    def run(
        self,
        plan: StepPlan,
        samplers: Mapping[int, RequestSampler],
        *,
        group_done: Callable[[int], None] | None = None,
    ) -> Sequence[Sampled]:
        """Compute the step. RowsFailed names the requests without a result and has the others'."""
        self._set_threads()
        errors: dict[int, KimistackError] = {}
        rows = []
        for row in plan.rows:
            fault = self._fault(row)
            if fault is None:
                rows.append(row)
            else:
                errors[row.request] = fault
        if not rows:
            if errors:
                raise RowsFailed(errors, ())
            return ()
        tokens = sum(len(row.ids) for row in rows)
        step = self._builder.build(rows, padded_rows(tokens))
        after_layer = None if group_done is None else self._group_ends(group_done)
        logits = self.model.forward(step, self._cache, after_layer)[:, : self._drawable]
        sampled = self._draw([row for row in rows if row.sample], logits, samplers, errors)
        if errors:
            raise RowsFailed(errors, sampled)
        return sampled

    def _group_ends(self, group_done: Callable[[int], None]) -> Callable[[int], None] | None:
        """What to call after each layer so that `group_done` hears of layer groups; None on a
        device, whose work has only been queued by then.
        """
        if self.model.device.type != "cpu":
            return None
        layers = accumulate(size // self._layer_bytes for size in self.layer_group_bytes)
        groups = {last - 1: group for group, last in enumerate(layers)}

        def after_layer(index: int) -> None:
            if (group := groups.get(index)) is not None:
                group_done(group)

        return after_layer

    def _set_threads(self) -> None:
        # OpenMP keeps the number per calling thread, and a new one starts with the machine's cores
        torch.set_num_threads(self._threads)

    def _fault(self, row: Row) -> KimistackError | None:
        """Why a row cannot be computed at all. Bad numbers would read or write others' rows."""
        end = row.start + len(row.ids)
        if end > self.spec.max_positions:
            return RequestError(
                f"position {end - 1} is beyond the model's {self.spec.max_positions} positions; "
                "shorten the prompt or max_tokens",
                param="messages",
                code="context_length_exceeded",
            )
        assert row.ids, "a row has tokens"
        assert row.start >= 0, "a row has a position"
        assert len(row.blocks) * self.block_tokens >= end, "the block table covers the row"
        assert 0 <= min(row.blocks) <= max(row.blocks) < self.blocks, "blocks are of this pool"
        for id_ in (min(row.ids), max(row.ids)):
            if not 0 <= id_ < self.spec.vocab_size:
                return RequestError(
                    f"token id {id_} is outside the model's {self.spec.vocab_size} ids"
                )
        return None

    def _draw(
        self,
        rows: Sequence[Row],
        logits: Tensor,
        samplers: Mapping[int, RequestSampler],
        errors: dict[int, KimistackError],
    ) -> list[Sampled]:
        if not rows:
            return []
        # both carry a row's NaN; to look at every element alone takes several times as long
        extremes = torch.stack(torch.aminmax(logits, dim=1), dim=1)
        finite: list[bool] = torch.isfinite(extremes).all(dim=1).tolist()
        greedy: list[int] = logits.argmax(dim=1).tolist()  # the first of equals: the lowest id
        values = logits.cpu().numpy()
        sampled = []
        for number, row in enumerate(rows):
            sampler = samplers[row.request]
            if not finite[number]:
                errors[row.request] = NonFiniteLogits(
                    f"the logits at position {row.start + len(row.ids)} are not finite; "
                    "its KV is discarded, send the request again"
                )
            elif sampler.takes_argmax and sampler.vocab_size >= self._drawable:
                sampled.append(Sampled(row.request, greedy[number]))
            else:
                try:
                    id_, logprob = sampler.draw(values[number])
                except KimistackError as error:
                    errors[row.request] = error
                else:
                    sampled.append(Sampled(row.request, id_, logprob))
        return sampled
