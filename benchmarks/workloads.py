"""Create the measured tensors and their contents. Importing this module does not import torch."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

MIB = 1 << 20
GIB = 1 << 30

MANY = 10_000
WORDS = MIB // 8  # 64-bit words in the pieces whose sums are compared


def decoder_shapes() -> Iterator[tuple[int, ...]]:
    """Yield the weight shapes of an 8B Llama, fused as in inference engines."""
    hidden, inter, vocab, layers, kv = 4096, 14336, 128256, 32, 1024
    yield (vocab, hidden)
    for _ in range(layers):
        yield (hidden + 2 * kv, hidden)
        yield (hidden, hidden)
        yield (2 * inter, hidden)
        yield (hidden, inter)
        yield (hidden,)
        yield (hidden,)
    yield (hidden,)
    yield (vocab, hidden)


def decoder_bytes() -> int:
    """Return the size of the decoder's weights in bfloat16."""
    return sum(
        2 * (shape[0] * shape[1] if len(shape) > 1 else shape[0]) for shape in decoder_shapes()
    )


def decoder(device: int = 0) -> list[Any]:
    """Create the decoder's 195 weight tensors, 16 GB, with undefined contents."""
    import torch

    return [
        torch.empty(shape, dtype=torch.bfloat16, device=f"cuda:{device}")
        for shape in decoder_shapes()
    ]


def blocks(count: int, size: int) -> list[Any]:
    """Create `count` tensors of `size` bytes, with undefined contents."""
    import torch

    return [torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(count)]


# --- contents ------------------------------------------------------------------------------------


def words_of(tensor: Any) -> Any:
    """Return a tensor's bytes as flat 64-bit integers; the byte count must be a multiple of 8."""
    import torch

    return tensor.view(-1).view(torch.int64)


def randomise(tensors: Iterable[Any], seed: int) -> None:
    """Fill tensors with random bits that are determined by the seed."""
    import torch

    torch.manual_seed(seed)
    for tensor in tensors:
        words_of(tensor).random_()


def change(tensors: Iterable[Any]) -> None:
    """Change every 64-bit word of the tensors."""
    for tensor in tensors:
        words_of(tensor).add_(1)


def sums(tensors: Iterable[Any]) -> Any:
    """Return the sum of each MiB of the tensors (and of their remainders), on the CPU."""
    import torch

    found = []
    for tensor in tensors:
        words = words_of(tensor)
        whole = words.numel() // WORDS * WORDS
        found.append(words[:whole].view(-1, WORDS).sum(1))
        if whole < words.numel():
            found.append(words[whole:].sum().view(1))
    return torch.cat([part.cpu() for part in found])


def all_zero(tensors: Iterable[Any]) -> bool:
    """Return whether every byte of the tensors is zero, as determined by sums."""
    return not sums(tensors).any().item()


# --- the device ----------------------------------------------------------------------------------


def start_cuda(devices: Sequence[int] = (0,)) -> None:
    """Create the context of each device."""
    import torch

    for device in devices:
        torch.zeros(1, device=f"cuda:{device}")


def synchronise(devices: Sequence[int] = (0,)) -> None:
    """Wait until the devices are idle."""
    import torch

    for device in devices:
        torch.cuda.synchronize(device)


def free_bytes(devices: Sequence[int] = (0,)) -> int:
    """Return the free memory of the devices, as reported by the driver."""
    import torch

    return sum(int(torch.cuda.mem_get_info(device)[0]) for device in devices)


def timed_ms(call: Callable[[], object], devices: Sequence[int] = (0,)) -> float:
    """Return the duration of a call in milliseconds; the devices are idle before and after."""
    synchronise(devices)
    start = time.perf_counter()
    call()
    synchronise(devices)
    return round((time.perf_counter() - start) * 1e3, 3)


def stop_collecting() -> None:
    """Disable garbage collection during measurements, because it is slow with many tensors."""
    gc.collect()
    gc.freeze()
    gc.disable()
