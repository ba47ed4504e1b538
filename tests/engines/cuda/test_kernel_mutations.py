"""Bugs planted in kernels.cu, each of which some check has to find: does the fiber executor see what a GPU would do?

A schedule finds results that are wrong in some order of the threads, ThreadSanitizer those that could be in another.
AddressSanitizer finds reads and writes beyond the memory, which without it may pass unseen.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import sanitize
from fiber_executor import COMPILER, FiberExecutor, sanitizer_runtime

from engines.cuda.kernels import kernel_source
from engines.errors import DeviceError

BARRIER = "__syncthreads();"
BARRIERS = 7


@dataclass(frozen=True)
class Mutation:
    """`old` becomes `new` at the `nth` of its `places`. `check` finds it, and says so in words that contain `words`."""

    name: str
    old: str
    new: str
    check: tuple[str, int] = ("", 0)  # sanitizer, seed of the threads' order
    words: str = "wrong"
    nth: int = 0
    places: int = 1

    def mutant(self) -> str:
        parts = kernel_source().split(self.old)
        assert len(parts) == self.places + 1, f"{self.name}: {len(parts) - 1} places, expected {self.places}"
        head, tail = self.old.join(parts[: self.nth + 1]), self.old.join(parts[self.nth + 1 :])
        return head + self.new + tail


PLAIN, SHUFFLED, THREAD, ADDRESS = ("", 0), ("", 7), ("thread", 0), ("address", 0)  # sanitizer, seed
LANES = "for (int distance = 16; distance > 0; distance /= 2) {"
CLEAR = "for (unsigned i = threadIdx.x; i < COUNTERS; i += THREADS) counters[i] = 0;"
COUNTER = "counters[counter_of(fabsf(x) * tensor.scale)]"
FIRST = "    __syncthreads();\n    for (int t = tensor_at"
INSIDE = "if (index < tensor.elements) {\n"
ELEMENT = "const float x = element(tensor, index);\n"
SHOWN = "column.first >= 0 && row.first >= 0"


def racing(name: str, old: str, new: str) -> Mutation:
    """A race that no schedule of whole threads shows: no other thread runs between a read and its write."""
    return Mutation(f"{name} without atomics", old, new, THREAD, "data race")


MUTATIONS = [
    Mutation("the barrier after the first clearing dropped", BARRIER, ";", nth=0, places=BARRIERS),
    Mutation("the barrier before the flush dropped", BARRIER, ";", THREAD, "data race", 1, BARRIERS),
    Mutation("the barrier after the flush dropped", BARRIER, ";", nth=2, places=BARRIERS),
    Mutation("the barrier after the shares' sums dropped", BARRIER, ";", SHUFFLED, nth=3, places=BARRIERS),
    Mutation("the barrier before the prefix sums dropped", BARRIER, ";", nth=4, places=BARRIERS),
    Mutation("the barrier after the prefix sums dropped", BARRIER, ";", nth=5, places=BARRIERS),
    Mutation("the barrier within the minimum dropped", BARRIER, ";", SHUFFLED, nth=6, places=BARRIERS),
    racing("shared counters", f"atomicAdd(&{COUNTER}, 1u)", f"++{COUNTER}"),
    racing("zeros", "atomicAdd(&row[ZEROS], (u64)tally.zeros)", "row[ZEROS] += tally.zeros"),
    racing("non-finite", "atomicAdd(&row[NONFINITE], (u64)tally.nonfinite)", "row[NONFINITE] += tally.nonfinite"),
    racing("maxima", "atomicMax(&row[AMAX], (u64)tally.amax)", "row[AMAX] = max(row[AMAX], (u64)tally.amax)"),
    racing("global counters", "atomicAdd(&row[i], (u64)count)", "row[i] += count"),
    racing("chosen bins", "atomicMax(&chosen[blockIdx.x], widest)", "chosen[blockIdx.x] = widest"),
    Mutation("values beyond the tail counted", "bits - 1u < tensor.limit - 1u", "bits != 0", ADDRESS, "Sanitizer"),
    Mutation("infinity counted", "bits - 1u < tensor.limit - 1u", "bits - 1u < tensor.limit", words="written behind"),
    Mutation("one value past the end counted", "index < tensor.elements", "index <= tensor.elements"),
    Mutation(
        "values past the end read but not counted",
        INSIDE + "            " + ELEMENT,
        ELEMENT + "        " + INSIDE,
        ADDRESS,
        "heap-buffer-overflow",
    ),
    Mutation("half a warp skips a shuffle", LANES, f"if (threadIdx.x % 32 < 16) {LANES}", words="deadlock"),
    Mutation("a mask without its caller", "FULL_WARP, value,", "0xffffu, value,", words="does not name the lane"),
    Mutation(
        "a barrier in one warp only", BARRIER, f"if (threadIdx.x < 32) {BARRIER}", PLAIN, "divergence", 5, BARRIERS
    ),
    Mutation(
        "threads without work return early",
        FIRST,
        "    if (begin + threadIdx.x >= end) return;\n" + FIRST,
        words="barrier divergence",
    ),
    Mutation("tail counters not zeroed", CLEAR, CLEAR.replace("COUNTERS", "BINS")),
    Mutation("counters kept for the next tensor", "        counters[i] = 0;\n    }\n", "    }\n"),
    Mutation("shared arrays past their end", "partial + THREADS)", "partial + THREADS + 2)", ADDRESS, "after-poison"),
    Mutation("shared arrays that overlap", "(partial + THREADS)", "(partial + 1)"),
    Mutation("rounding to nearest", "__fadd_rd(y, 8388608.0f)", "(y + 8388608.0f)"),
    Mutation("levels rounded down", "+ 2) >> 2;", ") >> 2;"),
    Mutation("levels rounded once, of all their bits",
             "(((above >> 4) * row.first_weight >> 16) + ((below >> 4) * row.second_weight >> 16) + 2) >> 2",
             "(above * row.first_weight + below * row.second_weight + (1 << 21)) >> 22"),
    Mutation("rows weighed the wrong way round", "(below >> 4) * row.second_weight", "(below >> 4) * row.first_weight"),
    Mutation("the lower row read from the upper one", "lower[column.second]", "upper[column.second]"),
    Mutation("the columns' taps taken for the rows'", "taps[width + pixel / width]", "taps[pixel / width]", ADDRESS,
             "heap-buffer-overflow"),
    Mutation("frames of any stride read as if packed", "(long long)row.second * row_bytes",
             "(long long)row.second * (row_bytes - 9)"),
    Mutation("padding left out above and below", SHOWN, "column.first >= 0", ADDRESS, "heap-buffer-overflow"),
    Mutation("padding left out to the sides", SHOWN, "row.first >= 0", ADDRESS, "heap-buffer-overflow"),
    Mutation("a pixel too many", "if (pixel >= pixels) return;", "if (pixel > pixels) return;", ADDRESS,
             "heap-buffer-overflow"),
    Mutation("red for blue in the grey", "levels[0] * BLUE", "levels[2] * BLUE"),
    Mutation("grey rounded down", " + (1 << 14)) >> 15", ") >> 15"),
    Mutation("channels in the frame's order", "color == RGB ? levels[0] : levels[2]", "levels[2]"),
    Mutation("three channels for grey", "color == GRAY ? 1 : 3", "3", ADDRESS, "heap-buffer-overflow"),
    Mutation("channels last written as if first", "transform->channels_last ? ", "false ? "),
    Mutation("channels last of a grey image three apart", "(u64)pixel * channels + k", "(u64)pixel * 3 + k", ADDRESS,
             "heap-buffer-overflow"),
    Mutation("bytes written as floats", "if (transform->is_bytes)", "if (false)", ADDRESS, "heap-buffer-overflow"),
    Mutation("one gain for all channels", "transform->gain[k]", "transform->gain[0]"),
    Mutation("a product and a sum rounded once",
             "__fadd_rn(__fmul_rn((float)ordered[k], transform->gain[k]), transform->bias[k])",
             "fmaf((float)ordered[k], transform->gain[k], transform->bias[k])"),
]  # fmt: skip


def checked(source: str, sanitizer: str, seed: int) -> str:
    """Return the finding of `sanitize.run`; skips where no compiler can build this check."""
    if COMPILER is None or (sanitizer and not sanitizer_runtime(sanitizer)):
        pytest.skip(f"no C++ compiler with the sanitizer '{sanitizer}': install g++, or set CXX")
    return sanitize.run(source, sanitizer, seed)


@pytest.mark.trial
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_is_found(mutation: Mutation) -> None:
    assert mutation.words in checked(mutation.mutant(), *mutation.check)


@pytest.mark.slow
@pytest.mark.parametrize(
    "check", [SHUFFLED, *(pytest.param(each, marks=pytest.mark.trial) for each in (PLAIN, THREAD, ADDRESS))], ids=str
)
def test_the_kernels_themselves_are_clean(check: tuple[str, int]) -> None:
    assert checked(kernel_source(), *check) == ""


def test_a_launch_that_no_gpu_would_take_is_refused() -> None:
    if COMPILER is None:
        pytest.skip("no C++ compiler to build kernels.cu for the CPU: install g++, or set CXX")
    executor = FiberExecutor(sanitize.GEOMETRY)
    with pytest.raises(DeviceError, match="invalid configuration: grid 0"):
        executor.launch("entropy_search", 0, [np.int32(0)] * 4)
    with pytest.raises(DeviceError, match=r"invalid configuration.* 262144 bytes of shared memory"):
        executor.launch("entropy_search", 1, [np.int32(0)] * 4, shared_bytes=1 << 18)


def test_every_barrier_is_in_the_list() -> None:
    assert kernel_source().count(BARRIER) == BARRIERS
    assert {m.nth for m in MUTATIONS if m.old == BARRIER and m.new == ";"} == set(range(BARRIERS))
