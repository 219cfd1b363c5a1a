# ruff: noqa: E501  (messages are as long as they are)
"""Messages as public reports of issues have them, with what each figure is and what follows.

The figures are those of the text, in its own units; what follows from them was worked out by hand.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Case(NamedTuple):
    """A message, the fields that it has, and its cause."""

    name: str
    text: str
    fields: dict[str, Any]
    cause: str


def kib(number: float) -> int:
    return round(number * 2**10)


def mib(number: float) -> int:
    return round(number * 2**20)


def gib(number: float) -> int:
    return round(number * 2**30)


SIZE, FRAGMENTATION, LIMIT, UNKNOWN = "size", "fragmentation", "limit", "unknown"
OLD_HINT = (
    " If reserved memory is >> allocated memory try setting max_split_size_mb to avoid "
    "fragmentation.  See documentation for Memory Management and PYTORCH_CUDA_ALLOC_CONF"
)
HINT_21 = (
    " If reserved but unallocated memory is large try setting max_split_size_mb to avoid "
    "fragmentation.  See documentation for Memory Management and PYTORCH_CUDA_ALLOC_CONF"
)
HINT = (
    " If reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF="
    "expandable_segments:True to avoid fragmentation.  See documentation for Memory Management  "
    "(https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
)
HINT_HIP = HINT.replace("CUDA_ALLOC", "HIP_ALLOC")
HINT_29 = HINT.replace("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def old(
    name: str, text: str, cause: str, device: int, asked: int, total: int, allocated: int,
    free: int, reserved: int, **more: Any,
) -> Case:  # fmt: skip
    """A message of torch 1.4 to 2.0, which has what is reserved in total."""
    fields = {
        "kind": "torch", "where": "device", "certain": True, "backend": "CUDA", "device": device,
        "requested": asked, "capacity": total, "allocated": allocated, "free": free,
        "unallocated": reserved - allocated, **more,
    }  # fmt: skip
    return Case(name, text, fields, cause)


def new(
    name: str, text: str, cause: str, asked: int, total: int | None, free: int | None,
    allocated: int, unallocated: int, **more: Any,
) -> Case:  # fmt: skip
    """A message of torch 2.1 and later, which has what is reserved but unallocated."""
    fields = {
        "kind": "torch", "where": "device", "certain": True, "backend": "CUDA", "device": 0,
        "requested": asked, "capacity": total, "free": free, "allocated": allocated,
        "unallocated": unallocated, **more,
    }  # fmt: skip
    return Case(name, text, fields, cause)


CUDA_OLD = [
    # 1.24 GiB - 781.59 MiB = 488.17 MiB; 2.26 < 3.03 free
    old("1.8, more free than requested",
        "CUDA out of memory. Tried to allocate 2.26 GiB (GPU 0; 6.00 GiB total capacity; 781.59 MiB "
        "already allocated; 3.03 GiB free; 1.24 GiB reserved in total by PyTorch) ",
        UNKNOWN, 0, gib(2.26), gib(6), mib(781.59), gib(3.03), gib(1.24)),
    # 19.75 MiB + (13.71 - 8.77) GiB = 4.96 GiB > 2.87 GiB
    old("1.8, fragmented",
        "RuntimeError: CUDA out of memory. Tried to allocate 2.87 GiB (GPU 0; 14.76 GiB total "
        "capacity; 8.77 GiB already allocated; 19.75 MiB free; 13.71 GiB reserved in total by PyTorch)",
        FRAGMENTATION, 0, gib(2.87), gib(14.76), gib(8.77), mib(19.75), gib(13.71)),
    # 2.88 MiB + 10.24 MiB = 13.1 MiB, but the difference of two GiB figures may be 10 MiB wrong
    old("1.8, rounded too far",
        "Tried to allocate 20.00 MiB (GPU 0; 1.96 GiB total capacity; 1.24 GiB already allocated; "
        "2.88 MiB free; 1.25 GiB reserved in total by PyTorch)",
        UNKNOWN, 0, mib(20), gib(1.96), gib(1.24), mib(2.88), gib(1.25), backend=None),
    # 33.56 MiB + 184.32 MiB = 217.9 MiB > 130 MiB
    old("1.8, second GPU",
        "whyCUDA out of memory. Tried to allocate 130.00 MiB (GPU 1; 7.80 GiB total capacity; 5.91 GiB "
        "already allocated; 33.56 MiB free; 6.09 GiB reserved in total by PyTorch)",
        FRAGMENTATION, 1, mib(130), gib(7.80), gib(5.91), mib(33.56), gib(6.09), backend=None),
    # 569.81 + 317.44 = 887 MiB < 1006 MiB
    old("1.9, size",
        "RuntimeError: CUDA out of memory. Tried to allocate 1006.00 MiB (GPU 0; 10.91 GiB total "
        "capacity; 9.18 GiB already allocated; 569.81 MiB free; 9.49 GiB reserved in total by PyTorch)",
        SIZE, 0, mib(1006), gib(10.91), gib(9.18), mib(569.81), gib(9.49)),
    # 259.75 + 61.44 = 321 MiB < 384 MiB
    old("1.8, size by 63 MiB",
        "RuntimeError: CUDA out of memory. Tried to allocate 384.00 MiB (GPU 0; 14.76 GiB total "
        "capacity; 11.04 GiB already allocated; 259.75 MiB free; 11.10 GiB reserved in total by PyTorch)",
        SIZE, 0, mib(384), gib(14.76), gib(11.04), mib(259.75), gib(11.10)),
    # 6 + 11.03 MiB = 17 MiB > 2 MiB: small tensors
    old("1.8, a small tensor",
        "RuntimeError: CUDA out of memory. Tried to allocate 2.00 MiB (GPU 0; 3.79 GiB total capacity; "
        "654.97 MiB already allocated; 6.00 MiB free; 666.00 MiB reserved in total by PyTorch)",
        UNKNOWN, 0, mib(2), gib(3.79), mib(654.97), mib(6), mib(666)),
    # 14.25 + 20.48 = 34.7 MiB > 16 MiB, but 20.48 may be 10.5 MiB wrong: 24.2 is still more
    old("1.11, with the hint",
        "RuntimeError: CUDA out of memory. Tried to allocate 16.00 MiB (GPU 0; 3.94 GiB total capacity; "
        "2.98 GiB already allocated; 14.25 MiB free; 3.00 GiB reserved in total by PyTorch)" + OLD_HINT,
        FRAGMENTATION, 0, mib(16), gib(3.94), gib(2.98), mib(14.25), gib(3.00)),
    # 478 + 112.64 = 590.6 MiB < 1.39 GiB
    old("1.13, Windows",
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.39 GiB (GPU 0; 6.00 GiB "
        "total capacity; 4.04 GiB already allocated; 478.00 MiB free; 4.15 GiB reserved in total by "
        "PyTorch)" + OLD_HINT,
        SIZE, 0, gib(1.39), gib(6), gib(4.04), mib(478), gib(4.15)),
    # 1.05 + 0 < 1.12 by 71.7 MiB
    old("2.0, nothing unallocated",
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.12 GiB (GPU 0; 15.77 GiB "
        "total capacity; 13.52 GiB already allocated; 1.05 GiB free; 13.52 GiB reserved in total by "
        "PyTorch)" + OLD_HINT,
        SIZE, 0, gib(1.12), gib(15.77), gib(13.52), gib(1.05), gib(13.52)),
    # 1.31 GiB + 384.27 MiB = 1.685 GiB, 1.69 requested: within rounding
    old("2.0, within rounding",
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.69 GiB (GPU 0; 14.56 GiB "
        "total capacity; 649.97 MiB already allocated; 1.31 GiB free; 1.01 GiB reserved in total by "
        "PyTorch)" + OLD_HINT,
        UNKNOWN, 0, gib(1.69), gib(14.56), mib(649.97), gib(1.31), gib(1.01)),
    # Windows: 17.20 GiB allocated of 8; 10.73 > 8
    old("2.0, more allocated than there is",
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 10.73 GiB (GPU 0; 8.00 GiB "
        "total capacity; 17.20 GiB already allocated; 0 bytes free; 19.15 GiB reserved in total by "
        "PyTorch)" + OLD_HINT,
        SIZE, 0, gib(10.73), gib(8), gib(17.20), 0, gib(19.15)),
    # broken lines, as a narrow terminal writes them; 0 + 2.42 GiB > 2.11 GiB
    old("2.0, broken over lines",
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.11 GiB (GPU 0; 8.00 GiB "
        "total capacity; 19.84 GiB already allocated; 0 bytes free; 22.26 GiB\n reserved in total by "
        "PyTorch) If reserved memory is >> allocated memory try setting max_split_size_mb to avoid "
        "fragmentation.  See documentation for Memory Mana\ngement and PYTORCH_CUDA_ALLOC_CONF",
        FRAGMENTATION, 0, gib(2.11), gib(8), gib(19.84), 0, gib(22.26)),
    # 565.31 + 20.48 MiB < 1.63 GiB
    old("2.0, 44 GiB",
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.63 GiB (GPU 0; 44.56 GiB "
        "total capacity; 27.91 GiB already allocated; 565.31 MiB free; 27.93 GiB reserved in total by "
        "PyTorch)" + OLD_HINT,
        SIZE, 0, gib(1.63), gib(44.56), gib(27.91), mib(565.31), gib(27.93)),
    # 1.04 GiB + 10 MiB < 1.71 GiB
    old("2.0, OutOfMemoryError without its module",
        "OutOfMemoryError: CUDA out of memory. Tried to allocate 1.71 GiB (GPU 0; 6.00 GiB total "
        "capacity; 3.49 GiB already allocated; 1.04 GiB free; 3.50 GiB reserved in total by PyTorch)"
        + OLD_HINT,
        SIZE, 0, gib(1.71), gib(6), gib(3.49), gib(1.04), gib(3.50)),
    # 0 + 399.36 MiB > 192 MiB
    old("2.0, nothing free",
        "OutOfMemoryError: CUDA out of memory. Tried to allocate 192.00 MiB (GPU 0; 4.00 GiB total "
        "capacity; 3.08 GiB already allocated; 0 bytes free; 3.47 GiB reserved in total by PyTorch)"
        + OLD_HINT + "\nTime taken: 2m 24.41sTorch active/reserved: 3457/3576 MiB, Sys VRAM: 4096/4096 "
        "MiB (100.0%)",
        FRAGMENTATION, 0, mib(192), gib(4), gib(3.08), 0, gib(3.47)),
    # 1.0: cached is what was not allocated; 8.7 MiB + 474.5 KiB = 9.16 MiB > 9 MiB by 0.17
    Case("1.0, cached",
         "RuntimeError: CUDA out of memory. Tried to allocate 9.00 MiB (GPU 0; 8.00 GiB total capacity; "
         "641.54 MiB already allocated; 8.70 MiB free; 474.50 KiB cached)",
         {"kind": "torch", "requested": mib(9), "capacity": gib(8), "allocated": mib(641.54),
          "free": mib(8.70), "unallocated": kib(474.5)}, FRAGMENTATION),
    # 1024 KiB requested, 576 KiB free and 30.96 MiB cached
    Case("1.0, KiB",
         "RuntimeError: CUDA out of memory. Tried to allocate 1024.00 KiB (GPU 0; 11.17 GiB total "
         "capacity; 10.90 GiB already allocated; 576.00 KiB free; 30.96 MiB cached)",
         {"kind": "torch", "requested": kib(1024), "capacity": gib(11.17), "allocated": gib(10.90),
          "free": kib(576), "unallocated": mib(30.96)}, FRAGMENTATION),
    # a limit of 4.77 GiB, of which 0.03 GiB were left for 50 MiB; 12.2 - 4.74 free
    old("2.0, a memory fraction",
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 50.00 MiB (GPU 0; 12.20 GiB "
        "total capacity; 4.70 GiB already allocated; 7.10 GiB free; 4.77 GiB allowed; 4.74 GiB reserved "
        "in total by PyTorch)" + OLD_HINT,
        LIMIT, 0, mib(50), gib(12.20), gib(4.70), gib(7.10), gib(4.74), allowed=gib(4.77)),
]  # fmt: skip

CUDA_NEW = [
    # 8.44 + 410.41 = 418.9 MiB > 138 MiB
    new("2.1, another process",
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 138.00 MiB.\nGPU 0 has a "
        "total capacty of 15.90 GiB of which 8.44 MiB is free.\nProcess 1246069 has 577.00 MiB memory "
        "in use. Including non-PyTorch memory,\nthis process has 15.32 GiB memory in use. Of the "
        "allocated memory\n14.12 GiB is allocated by PyTorch, and 410.41 MiB is reserved\nby PyTorch but "
        "unallocated." + HINT_21,
        FRAGMENTATION, mib(138), gib(15.90), mib(8.44), gib(14.12), mib(410.41),
        process=gib(15.32), others=((1246069, mib(577)),)),
    # 0 + 2.30 > 1.70
    new("2.1, nothing free",
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.70 GiB. GPU 0 has a total "
        "capacty of 6.00 GiB of which 0 bytes is free. Of the allocated memory 2.93 GiB is allocated by "
        "PyTorch, and 2.30 GiB is reserved by PyTorch but unallocated." + HINT_21,
        FRAGMENTATION, gib(1.70), gib(6), 0, gib(2.93), gib(2.30), process=None, others=()),
    # 55.57 GiB at once of 12 GiB
    new("2.1, larger than the device",
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 55.57 GiB. GPU 0 has a total "
        "capacty of 12.00 GiB of which 9.02 GiB is free. Of the allocated memory 984.52 MiB is allocated "
        "by PyTorch, and 463.48 MiB is reserved by PyTorch but unallocated." + HINT_21,
        SIZE, gib(55.57), gib(12), gib(9.02), mib(984.52), mib(463.48)),
    # 41.56 MiB free for 32 MiB
    new("2.1, more free than requested",
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 32.00 MiB. GPU 0 has a total "
        "capacty of 4.00 GiB of which 41.56 MiB is free. Including non-PyTorch memory, this process has "
        "3.44 GiB memory in use. Of the allocated memory 2.58 GiB is allocated by PyTorch, and 1.90 MiB "
        "is reserved by PyTorch but unallocated." + HINT_21 + ".",
        UNKNOWN, mib(32), gib(4), mib(41.56), gib(2.58), mib(1.90), process=gib(3.44)),
    # 235.06 + 330.42 = 565.5 MiB > 496 MiB; the process is itself: 14.52 - 14.06 - 0.32 = 0.14 GiB
    new("2.1, in a container",
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 496.00 MiB. GPU 0 has a total "
        "capacty of 14.75 GiB of which 235.06 MiB is free. Process 20398 has 14.52 GiB memory in use. Of "
        "the allocated memory 14.06 GiB is allocated by PyTorch, and 330.42 MiB is reserved by PyTorch "
        "but unallocated." + HINT_21,
        FRAGMENTATION, mib(496), gib(14.75), mib(235.06), gib(14.06), mib(330.42),
        others=((20398, gib(14.52)),)),
    # 12.73 + 9.35 = 22.08 < 22.78
    new("2.5, size",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 22.78 GiB. GPU 0 has a total "
        "capacity of 31.47 GiB of which 12.73 GiB is free. Including non-PyTorch memory, this process "
        "has 18.73 GiB memory in use. Of the allocated memory 9.08 GiB is allocated by PyTorch, and 9.35 "
        "GiB is reserved by PyTorch but unallocated." + HINT,
        SIZE, gib(22.78), gib(31.47), gib(12.73), gib(9.08), gib(9.35), process=gib(18.73)),
    # 11.06 + 194.87 MiB > 22 MiB
    new("2.2, fragmented",
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 22.00 MiB. GPU 0 has a total "
        "capacity of 23.65 GiB of which 11.06 MiB is free. Including non-PyTorch memory, this process has "
        "23.60 GiB memory in use. Of the allocated memory 22.90 GiB is allocated by PyTorch, and 194.87 "
        "MiB is reserved by PyTorch but unallocated." + HINT,
        FRAGMENTATION, mib(22), gib(23.65), mib(11.06), gib(22.90), mib(194.87), process=gib(23.60)),
    # 30.29 > 10.74
    new("2.6, FramePack",
        "...CUDA out of memory. Tried to allocate 30.29 GiB. GPU 0 has a total capacity of 10.74 GiB of "
        "which 3.69 GiB is free. Including non-PyTorch memory, this process has 6.68 GiB memory in use. "
        "Of the allocated memory 6.10 GiB is allocated by PyTorch, and 396.58 MiB is reserved by PyTorch "
        "but unallocated." + HINT + "\nUnloaded DynamicSwap_LlamaModel as complete.\nUnloaded "
        "AutoencoderKLHunyuanVideo as complete.",
        SIZE, gib(30.29), gib(10.74), gib(3.69), gib(6.10), mib(396.58), process=gib(6.68)),
    # 0 + 129.48 MiB < 1002 MiB; Windows
    new("2.5, Windows",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1002.00 MiB. GPU 0 has a total "
        "capacity of 8.00 GiB of which 0 bytes is free. Of the allocated memory 13.98 GiB is allocated "
        "by PyTorch, and 129.48 MiB is reserved by PyTorch but unallocated." + HINT,
        SIZE, mib(1002), gib(8), 0, gib(13.98), mib(129.48)),
    # 185.50 + 142.12 = 327.6 > 256
    new("2.7, fragmented",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 256.00 MiB. GPU 0 has a total "
        "capacity of 9.77 GiB of which 185.50 MiB is free. Including non-PyTorch memory, this process "
        "has 9.43 GiB memory in use. Of the allocated memory 9.04 GiB is allocated by PyTorch, and 142.12 "
        "MiB is reserved by PyTorch but unallocated." + HINT,
        FRAGMENTATION, mib(256), gib(9.77), mib(185.50), gib(9.04), mib(142.12), process=gib(9.43)),
    # 3.71 GiB + 771.43 MiB = 4.46 GiB > 4.22 GiB
    new("2.5, fragmented by 0.24 GiB",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 4.22 GiB. GPU 0 has a total "
        "capacity of 15.69 GiB of which 3.71 GiB is free. Including non-PyTorch memory, this process has "
        "11.14 GiB memory in use. Of the allocated memory 10.14 GiB is allocated by PyTorch, and 771.43 "
        "MiB is reserved by PyTorch but unallocated." + HINT,
        FRAGMENTATION, gib(4.22), gib(15.69), gib(3.71), gib(10.14), mib(771.43), process=gib(11.14)),
    # 124.68 > 95.22; itself is 734147: 29.07 - 28.64 = 0.43 GiB
    new("2.5, two processes of a container",
        "CUDA out of memory. Tried to allocate 124.68 GiB. GPU 0 has a total capacity of 95.22 GiB of "
        "which 51.23 GiB is free. Process 608946 has 14.91 GiB memory in use. Process 734147 has 29.07 "
        "GiB memory in use. Of the allocated memory 25.50 GiB is allocated by PyTorch, and 3.14 GiB is "
        "reserved by PyTorch but unallocated." + HINT,
        SIZE, gib(124.68), gib(95.22), gib(51.23), gib(25.50), gib(3.14),
        others=((608946, gib(14.91)), (734147, gib(29.07)))),
    # 26.16 + 40.69 > 35.60
    new("2.5, 40 GiB unallocated",
        "CUDA out of memory. Tried to allocate 35.60 GiB. GPU 0 has a total capacity of 79.33 GiB of "
        "which 26.16 GiB is free. Process 76883 has 53.16 GiB memory in use. Of the allocated memory "
        "11.97 GiB is allocated by PyTorch, and 40.69 GiB is reserved by PyTorch but unallocated." + HINT,
        FRAGMENTATION, gib(35.60), gib(79.33), gib(26.16), gib(11.97), gib(40.69),
        others=((76883, gib(53.16)),)),
    # 189.06 > 47.27
    new("2.5, in the middle of a traceback",
        "    matmul_result = torch.empty(\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate "
        "189.06 GiB. GPU 0 has a total capacity of 47.27 GiB of which 29.71 GiB is free. Process 3830303 "
        "has 17.55 GiB memory in use. Of the allocated memory 17.08 GiB is allocated by PyTorch, and "
        "279.90 MiB is reserved by PyTorch but unallocated." + HINT,
        SIZE, gib(189.06), gib(47.27), gib(29.71), gib(17.08), mib(279.90),
        others=((3830303, gib(17.55)),), line=2),
    # 1.58 GiB + 33.93 MiB = 1.61 < 1.95; the other process has 12.02
    new("2.9, another process has the device",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.95 GiB. GPU 0 has a total "
        "capacity of 14.57 GiB of which 1.58 GiB is free. Process 2493055 has 12.02 GiB memory in use. "
        "Including non-PyTorch memory, this process has 966.00 MiB memory in use. Of the allocated memory "
        "734.07 MiB is allocated by PyTorch, and 33.93 MiB is reserved by PyTorch but unallocated."
        + HINT_29,
        SIZE, gib(1.95), gib(14.57), gib(1.58), mib(734.07), mib(33.93), process=mib(966),
        others=((2493055, gib(12.02)),)),
    # 9.81 + 163.19 > 26
    new("2.8, three processes",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 26.00 MiB. GPU 0 has a total "
        "capacity of 11.66 GiB of which 9.81 MiB is free. Process 3893521 has 618.00 MiB memory in use. "
        "Process 1493972 has 1.28 GiB memory in use. Including non-PyTorch memory, this process has 9.74 "
        "GiB memory in use. Of the allocated memory 9.30 GiB is allocated by PyTorch, and 163.19 MiB is "
        "reserved by PyTorch but unallocated." + HINT,
        FRAGMENTATION, mib(26), gib(11.66), mib(9.81), gib(9.30), mib(163.19), process=gib(9.74),
        others=((3893521, mib(618)), (1493972, gib(1.28)))),
    # Windows, 64 MiB: 0 + 3.16
    new("2.1, Windows with 22 of 8 GiB",
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 64.00 MiB. GPU 0 has a total "
        "capacty of 8.00 GiB of which 0 bytes is free. Of the allocated memory 22.44 GiB is allocated by "
        "PyTorch, and 3.16 MiB is reserved by PyTorch but unallocated." + HINT_21,
        SIZE, mib(64), gib(8), 0, gib(22.44), mib(3.16)),
    # a fraction of 0.5 that the message of 2.1 does not mention: 38.09 free for 64 MiB
    new("2.1, an unnamed fraction",
        "  content_understanding.utils.injected_exception.NonRetryableExceptionWrapper: (OutOfMemoryError) "
        "CUDA out of memory. Tried to allocate 64.00 MiB. GPU 0 has a total capacty of 79.15 GiB of which "
        "38.09 GiB is free. Including non-PyTorch memory, this process has 41.06 GiB memory in use. Of the "
        "allocated memory 39.10 GiB is allocated by PyTorch, and 427.46 MiB is reserved by PyTorch but "
        "unallocated." + HINT_21,
        UNKNOWN, mib(64), gib(79.15), gib(38.09), gib(39.10), mib(427.46), process=gib(41.06)),
    # WSL, where the driver gives no process: 17179869184.00 GiB
    new("2.3, WSL without the process's figure",
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total "
        "capacity of 23.99 GiB of which 0 bytes is free. Including non-PyTorch memory, this process has "
        "17179869184.00 GiB memory in use. Of the allocated memory 22.62 GiB is allocated by PyTorch, and "
        "317.61 MiB is reserved by PyTorch but unallocated." + HINT,
        FRAGMENTATION, mib(20), gib(23.99), 0, gib(22.62), mib(317.61), process=None),
    # 140.75 + 331.08 = 471.8 MiB < 786 MiB; itself is 3270336
    new("2.8, a worker of vLLM",
        "(EngineCore_DP0 pid=8884)     logits = logits.to(torch.float32)\n(EngineCore_DP0 pid=8884) torch."
        "OutOfMemoryError: CUDA out of memory. Tried to allocate 786.00 MiB. GPU 0 has a total capacity of "
        "79.11 GiB of which 140.75 MiB is free. Process 3270336 has 78.96 GiB memory in use. Of the allocated "
        "memory 68.83 GiB is allocated by PyTorch, with 660.00 MiB allocated in private pools (e.g., CUDA "
        "Graphs), and 331.08 MiB is reserved by PyTorch but unallocated." + HINT,
        SIZE, mib(786), gib(79.11), mib(140.75), gib(68.83), mib(331.08), private=mib(660),
        others=((3270336, gib(78.96)),), rank="EngineCore_DP0 pid=8884", line=2),
    # 21.75 + 275.38 > 50
    new("2.11, an error of vLLM's log",
        "(EngineCore pid=112) ERROR 05-01 14:39:06 [core.py:1131] torch.OutOfMemoryError: CUDA out of memory. "
        "Tried to allocate 50.00 MiB. GPU 0 has a total capacity of 23.56 GiB of which 21.75 MiB is free. "
        "Including non-PyTorch memory, this process has 23.50 GiB memory in use. Of the allocated memory 22.88 "
        "GiB is allocated by PyTorch, with 24.00 MiB allocated in private pools (e.g., CUDA Graphs), and 275.38 "
        "MiB is reserved by PyTorch but unallocated." + HINT + "\n(APIServer pid=1) ERROR 05-01 14:39:06 "
        "[async_llm.py:699] AsyncLLM output_handler failed.",
        FRAGMENTATION, mib(50), gib(23.56), mib(21.75), gib(22.88), mib(275.38), private=mib(24),
        process=gib(23.50), rank="EngineCore pid=112"),
    Case("a size that overflowed",
         "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate more than 1EB memory.",
         {"kind": "torch", "requested": 1 << 60, "free": None}, SIZE),
    # cut in the middle: no free memory known
    new("2.5, cut",
        "torch.OutOfMemoryError: CUDA out of memory.\nTried to allocate 12.00 MiB.\nGPU 0 has a total "
        "capacity of 79.25 GiB of which 8.94 MiB is free.\n... 77.59 GiB is allocated by PyTorch, and "
        "17.18 MiB is reserved by PyTorch but unallocated.",
        FRAGMENTATION, mib(12), gib(79.25), mib(8.94), gib(77.59), mib(17.18)),
    Case("no figure at all", "RuntimeError: CUDA out of memory.",
         {"kind": "torch", "backend": "CUDA", "requested": None, "free": None}, UNKNOWN),
]  # fmt: skip

OTHER_DEVICES = [
    # HIP: 7.12 GiB free for 432 MiB
    new("HIP, more free than requested",
        "HIP out of memory. Tried to allocate 432.00 MiB. GPU 0 has a total capacity of 15.92 GiB of which "
        "7.12 GiB is free. Of the allocated memory 8.08 GiB is allocated by PyTorch, and 321.96 MiB is "
        "reserved by PyTorch but unallocated." + HINT_HIP,
        UNKNOWN, mib(432), gib(15.92), gib(7.12), gib(8.08), mib(321.96), backend="HIP"),
    # 6.22 + 7.10 > 6.64
    new("HIP, fragmented",
        "!!! Exception during processing !!! HIP out of memory. Tried to allocate 6.64 GiB. GPU 0 has a "
        "total capacity of 19.92 GiB of which 6.22 GiB is free. Of the allocated memory 5.34 GiB is "
        "allocated by PyTorch, and 7.10 GiB is reserved by PyTorch but unallocated." + HINT_HIP,
        FRAGMENTATION, gib(6.64), gib(19.92), gib(6.22), gib(5.34), gib(7.10), backend="HIP"),
    # 1.05 GiB allowed = 1075.2 MiB; 1017.01 + 54.99 = 1072 reserved: 3.2 MiB left, 2 requested, and
    # 1.05 GiB may be 5 MiB less; the device has 244 GiB free
    new("HIP, a limit and private pools",
        "2025-11-12T11:25:13.4961658Z FAILED [0.0005s] test_autograd.py::TestAutogradDeviceTypeCUDA::test "
        "- torch.OutOfMemoryError: HIP out of memory. Tried to allocate 2.00 MiB. GPU 0 has a total "
        "capacity of 255.98 GiB of which 244.65 GiB is free. 1.05 GiB allowed; Of the allocated memory "
        "1017.01 MiB is allocated by PyTorch, with 17.00 MiB allocated in private pools (e.g., HIP Graphs),"
        " and 54.99 MiB is reserved by PyTorch but unallocated." + HINT,
        LIMIT, mib(2), gib(255.98), gib(244.65), mib(1017.01), mib(54.99), backend="HIP",
        allowed=gib(1.05), private=mib(17)),
    # 0 + 1.99 MiB < 76 MiB
    new("HIP, size",
        "test_torch.py::test_grad_scaling_accumulation_cuda - torch.OutOfMemoryError: HIP out of memory. "
        "Tried to allocate 76.00 MiB. GPU 0 has a total capacity of 287.98 GiB of which 0 bytes is free. "
        "Of the allocated memory 8.51 GiB is allocated by PyTorch, and 1.99 MiB is reserved by PyTorch but "
        "unallocated." + HINT,
        SIZE, mib(76), gib(287.98), 0, gib(8.51), mib(1.99), backend="HIP"),
    # 780.24 + 75.82 MiB < 3.31 GiB
    new("HIP, unified memory",
        "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 3.31 GiB. GPU 0 has a total capacity "
        "of 128.00 GiB of which 780.24 MiB is free. Of the allocated memory 57.70 GiB is allocated by "
        "PyTorch, and 75.82 MiB is reserved by PyTorch but unallocated." + HINT_HIP,
        SIZE, gib(3.31), gib(128), mib(780.24), gib(57.70), mib(75.82), backend="HIP"),
    # GPU 7; 203.49 free for 2 MiB
    new("HIP, GPU 7",
        "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 2.00 MiB. GPU 7 has a total capacity "
        "of 287.98 GiB of which 203.49 GiB is free. Of the allocated memory 68.63 GiB is allocated by "
        "PyTorch, and 14.93 GiB is reserved by PyTorch but unallocated." + HINT,
        UNKNOWN, mib(2), gib(287.98), gib(203.49), gib(68.63), gib(14.93), backend="HIP", device=7),
    # XPU: 5.65 free for 4.66
    new("XPU 2.12",
        "torch.OutOfMemoryError: XPU out of memory. Tried to allocate 4.66 GiB. GPU 0 has a total capacity "
        "of 5.65 GiB of which 5.65 GiB is free. Of the allocated memory 195.50 KiB is allocated by PyTorch, "
        "and 1.81 MiB is reserved by PyTorch but unallocated. Please use `empty_cache` to release all "
        "unoccupied cached memory.",
        UNKNOWN, gib(4.66), gib(5.65), gib(5.65), kib(195.5), mib(1.81), backend="XPU"),
    # a limit of 8.27: 8.11 requested is less
    new("XPU, a limit that was not passed",
        "torch.OutOfMemoryError: XPU out of memory. Tried to allocate 8.11 GiB. GPU 0 has a total capacity "
        "of 16.54 GiB of which 16.54 GiB is free. 8.27 GiB allowed; Of the allocated memory 0 bytes is "
        "allocated by PyTorch, and 0 bytes is reserved by PyTorch but unallocated. Please use `empty_cache` "
        "to release all unoccupied cached memory.",
        UNKNOWN, gib(8.11), gib(16.54), gib(16.54), 0, 0, backend="XPU", allowed=gib(8.27)),
    # 63.98 - 44.30 = 19.68 < 29.54
    new("XPU 2.8, no free memory in the text",
        "torch.OutOfMemoryError: XPU out of memory. Tried to allocate 29.54 GiB. GPU 0 has a total capacity "
        "of 63.98 GiB. Of the allocated memory 44.30 GiB is allocated by PyTorch, and 1.37 MiB is reserved "
        "by PyTorch but unallocated. Please use `empty_cache` to release all unoccupied cached memory.",
        SIZE, gib(29.54), gib(63.98), None, gib(44.30), mib(1.37), backend="XPU"),
    # of the extension: no free memory; 15.56 - 0.17 is more than 1.71
    Case("XPU, Intel's extension",
         "RuntimeError: XPU out of memory. Tried to allocate 1.71 GiB (GPU 0; 15.56 GiB total capacity; "
         "176.00 MiB already allocated; 176.00 MiB reserved in total by PyTorch)",
         {"kind": "torch", "backend": "XPU", "device": 0, "requested": gib(1.71),
          "capacity": gib(15.56), "allocated": mib(176), "unallocated": 0, "free": None}, UNKNOWN),
    # 9.57 + 17.35 + 0.29 = 27.21 > 27.20, within rounding
    Case("MPS 2.6",
         "MPS backend out of memory (MPS allocated: 9.57 GiB, other allocations: 17.35 GiB, max allowed: "
         "27.20 GiB). Tried to allocate 292.50 MiB on private pool. Use PYTORCH_MPS_HIGH_WATERMARK_RATIO="
         "0.0 to disable upper limit for memory allocations (may cause system failure).",
         {"kind": "mps", "where": "device", "backend": "MPS", "allocated": gib(9.57),
          "other": gib(17.35), "allowed": gib(27.20), "requested": mib(292.5)}, UNKNOWN),
    # 1.45 + 7.42 + 0.55 > 9.07
    Case("MPS 2.1, GB for GiB",
         "MPS backend out of memory (MPS allocated: 1.45 GB, other allocations: 7.42 GB, max allowed: 9.07 "
         "GB). Tried to allocate 563.62 MB on private pool. Use PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 to "
         "disable upper limit for memory allocations (may cause system failure).",
         {"kind": "mps", "allocated": gib(1.45), "other": gib(7.42), "allowed": gib(9.07),
          "requested": mib(563.62)}, SIZE),
    # 15.72 + 0 + 5.81 > 18.13
    Case("MPS, all of it by MPS",
         "MPS backend out of memory (MPS allocated: 15.72 GiB, other allocations: 2.41 MiB, max allowed: "
         "18.13 GiB). Tried to allocate 5.81 GiB on private pool. Use PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 "
         "to disable upper limit for memory allocations (may cause system failure).",
         {"kind": "mps", "allocated": gib(15.72), "other": mib(2.41), "allowed": gib(18.13),
          "requested": gib(5.81)}, SIZE),
    Case("MPS, cut",
         "RuntimeError: MPS backend out of memory (MPS allocated: 5.56 GB, other allocations: 1.10 G",
         {"kind": "mps", "allocated": gib(5.56), "allowed": None, "requested": None}, UNKNOWN),
    Case("MPS, a buffer larger than Metal takes", "RuntimeError: Invalid buffer size: 19.38 GiB",
         {"kind": "mps buffer", "where": "device", "requested": gib(19.38)}, UNKNOWN),
    # 15.99 - 15.16 = 0.83 GiB not allocated, 512 KiB requested
    Case("cudaMallocAsync, a small request",
         "Allocation on device 0 would exceed allowed memory. (out of memory)\nCurrently allocated : 15.16 "
         "GiB\nRequested : 512.00 KiB\nDevice limit : 15.99 GiB\nFree (according to CUDA): 0 bytes\n"
         "PyTorch limit (set by user-supplied memory fraction)\n: 17179869184.00 GiB",
         {"kind": "cudaMallocAsync", "device": 0, "allocated": gib(15.16), "requested": kib(512),
          "capacity": gib(15.99), "free": 0, "allowed": None}, UNKNOWN),
    # with the columns that torch writes
    Case("cudaMallocAsync, in columns",
         "torch.cuda.OutOfMemoryError: Allocation on device 0 would exceed allowed memory. (out of memory)\n"
         "Currently allocated     : 13.74 GiB\nRequested               : 640.00 MiB\nDevice limit            "
         ": 14.75 GiB\nFree (according to CUDA): 27.06 MiB\nPyTorch limit (set by user-supplied memory "
         "fraction)\n                        : 17179869184.00 GiB",
         {"kind": "cudaMallocAsync", "device": 0, "allocated": gib(13.74), "requested": mib(640),
          "capacity": gib(14.75), "free": mib(27.06), "allowed": None}, UNKNOWN),
]  # fmt: skip

LIBRARIES = [
    Case("driver, asynchronous",
         "RuntimeError: CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at "
         "some other API call, so the stacktrace below might be incorrect.\nFor debugging consider passing "
         "CUDA_LAUNCH_BLOCKING=1.\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.",
         {"kind": "driver", "where": "device", "certain": True, "backend": "CUDA"}, UNKNOWN),
    Case("driver, AcceleratorError", "torch.AcceleratorError: CUDA error: out of memory",
         {"kind": "driver", "where": "device", "certain": True}, UNKNOWN),
    Case("runtime, by its code",
         "CUDA error: out of memorySearch for `cudaErrorMemoryAllocation' in "
         "https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDRT__TYPES.html for more information.",
         {"kind": "library", "where": "device", "certain": True}, UNKNOWN),
    Case("cuBLAS",
         "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
         {"kind": "library", "where": "device", "certain": True}, UNKNOWN),
    Case("cuBLAS, not initialized",
         "RuntimeError: CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
         {"kind": "library", "where": "device", "certain": False}, UNKNOWN),
    Case("cuDNN", "RuntimeError: cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
         {"kind": "library", "where": "device", "certain": True}, UNKNOWN),
    Case("cuDNN, no engine",
         "RuntimeError: GET was unable to find an engine to execute this computation",
         {"kind": "library", "where": "device", "certain": False}, UNKNOWN),
    Case("NCCL",
         "ins-7df6eojsifuykig9:3018451:3018451 [0] enqueue.cc:1085 NCCL WARN Cuda failure 'out of memory'",
         {"kind": "nccl", "where": "device", "certain": True}, UNKNOWN),
    Case("NCCL, with its size",
         "ng30903:3063028:3066152 [3] include/alloc.h:185 NCCL WARN Failed to CUDA calloc 6291456 bytes",
         {"kind": "nccl", "requested": 6291456}, UNKNOWN),
    Case("NCCL, DistBackendError",
         "[rank7]: torch.distributed.DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/"
         "NCCLUtils.hpp:275, unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL version "
         "2.20.5\n[rank7]: ncclUnhandledCudaError: Call to CUDA function failed.\n[rank7]: Last error:\n"
         "[rank7]: Cuda failure 2 'out of memory'",
         {"kind": "nccl", "rank": "rank 7", "line": 4}, UNKNOWN),
    Case("bitsandbytes",
         "Error out of memory at line 351 in file /home/developer/bitsandbytes/csrc/pythonInterface.c",
         {"kind": "bitsandbytes", "where": "device", "certain": True}, UNKNOWN),
    Case("bitsandbytes, Windows",
         "Error out of memory at line 88 in file D:\\a\\bitsandbytes-windows-webui\\csrc\\ops.cu",
         {"kind": "bitsandbytes", "where": "device"}, UNKNOWN),
    Case("XPU, its runtime",
         "RuntimeError: UR backend failed. UR backend returns:40 (UR_RESULT_ERROR_OUT_OF_RESOURCES)",
         {"kind": "library", "where": "device", "certain": False}, UNKNOWN),
    Case("TensorFlow",
         "ResourceExhaustedError: OOM when allocating tensor with shape[32,1024,1024] and type float on "
         "/job:localhost/replica:0/task:0/device:GPU:0 by allocator GPU_0_bfc",
         {"kind": "tensorflow", "where": "device", "device": 0}, UNKNOWN),
    Case("torch, the type alone", "torch.OutOfMemoryError",
         {"kind": "driver", "where": "device", "certain": True}, UNKNOWN),
    Case("XLA",
         "jaxlib.xla_extension.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate "
         "9663676416 bytes.",
         {"kind": "xla", "where": "device", "requested": 9663676416}, UNKNOWN),
]  # fmt: skip

HOST = [
    Case("CPU allocator 1.8",
         "RuntimeError: [enforce fail at CPUAllocator.cpp:64] . DefaultCPUAllocator: can't allocate memory: "
         "you tried to allocate 1178729664 bytes. Error code 12 (Cannot allocate memory)",
         {"kind": "host allocator", "where": "host", "certain": True, "requested": 1178729664}, SIZE),
    Case("CPU allocator 1.12",
         "RuntimeError: [enforce fail at alloc_cpu.cpp:73] . DefaultCPUAllocator: can't allocate memory: "
         "you tried to allocate 116813856768 bytes. Error code 12 (Cannot allocate memory)",
         {"kind": "host allocator", "requested": 116813856768}, SIZE),
    Case("CPU allocator 2.x",
         "RuntimeError: [enforce fail at alloc_cpu.cpp:75] err == 0. DefaultCPUAllocator: can't allocate "
         "memory: you tried to allocate 132426121216 bytes. Error code 12 (Cannot allocate memory)",
         {"kind": "host allocator", "requested": 132426121216}, SIZE),
    Case("CPU allocator, another language",
         "RuntimeError: [enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't allocate "
         "memory: you tried to allocate 4294967296 bytes. Error code 12 (Nicht genügend Hauptspeicher "
         "verfügbar)",
         {"kind": "host allocator", "requested": 4294967296}, SIZE),
    Case("CPU allocator, Windows",
         "RuntimeError: [enforce fail at C:\\b\\abs_bao0hdcrdh\\croot\\pytorch_1675190257512\\work\\c10\\core"
         "\\impl\\alloc_cpu.cpp:81] data. DefaultCPUAllocator: not enough memory: you tried to allocate "
         "1981808640 bytes.",
         {"kind": "host allocator", "requested": 1981808640}, SIZE),
    Case("CPU allocator, in a server's log",
         "Error [enforce fail at CPUAllocator.cpp:67] . DefaultCPUAllocator: can't allocate memory: you "
         "tried to allocate 264896512 bytes. Error code 12 (Cannot allocate memory)\nIf you encounter CUDA "
         "out of memory, try to set --tile with a smaller number.",
         {"kind": "host allocator", "requested": 264896512}, SIZE),
    # 176351 x 176460 x 2 bytes = 57.96 GiB
    Case("numpy, uint16",
         "numpy.core._exceptions._ArrayMemoryError: Unable to allocate 58.0 GiB for an array with shape "
         "(176351, 176460) and data type uint16",
         {"kind": "array", "where": "host", "requested": gib(58.0), "shape": (176351, 176460),
          "dtype": "uint16"}, SIZE),
    Case("numpy, a point without decimals",
         "MemoryError: Unable to allocate 201. GiB for an array with shape (2999, 2999, 2999) and data type "
         "int64",
         {"kind": "array", "requested": gib(201), "shape": (2999, 2999, 2999), "dtype": "int64"}, SIZE),
    Case("numpy, MiB",
         "numpy.core._exceptions._ArrayMemoryError: Unable to allocate 94.9 MiB for an array with shape "
         "(2160, 3840, 3) and data type float32",
         {"kind": "array", "requested": mib(94.9), "shape": (2160, 3840, 3), "dtype": "float32"}, SIZE),
    Case("numpy 1.17, without a size",
         "numpy.core._exceptions.MemoryError: Unable to allocate array with shape (9681, 9681) and data type "
         "float64",
         {"kind": "array", "requested": None, "shape": (9681, 9681), "dtype": "float64"}, UNKNOWN),
    Case("numpy, one dimension",
         "numpy.core._exceptions._ArrayMemoryError: Unable to allocate 7.45 GiB for an array with shape "
         "(1000000000,) and data type float64",
         {"kind": "array", "requested": gib(7.45), "shape": (1000000000,), "dtype": "float64"}, SIZE),
    Case("MemoryError",
         'Traceback (most recent call last):\n  File "train.py", line 7, in <module>\n    rows = [0] * 10**12'
         "\nMemoryError",
         {"kind": "host", "where": "host", "certain": True, "line": 4,
          "place": "train.py:7 in <module>"}, UNKNOWN),
    Case("fork", "OSError: [Errno 12] Cannot allocate memory",
         {"kind": "host", "where": "host", "certain": True}, UNKNOWN),
    Case("CPU allocator, a negative size",
         "RuntimeError: [enforce fail at alloc_cpu.cpp:114] . DefaultCPUAllocator: can't allocate memory: you "
         "tried to allocate 18446744071562067968 bytes. Error code 12 (Cannot allocate memory)",
         {"kind": "host allocator", "requested": None}, SIZE),
    Case("Arrow", "pyarrow.lib.ArrowMemoryError: malloc of size 8589934592 failed",
         {"kind": "host", "where": "host", "certain": True, "requested": 8589934592}, SIZE),
    Case("HDF5", "OSError: Can't read data (memory allocation failed)",
         {"kind": "host", "where": "host", "certain": True}, UNKNOWN),
    Case("oneDNN", "RuntimeError: could not create a primitive",
         {"kind": "onednn", "where": "host", "certain": False}, UNKNOWN),
    Case("Java, under Spark", 'Exception in thread "main" java.lang.OutOfMemoryError: Java heap space',
         {"kind": "host", "where": "host", "certain": True}, UNKNOWN),
    Case("bad_alloc",
         "terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc\n"
         "Aborted (core dumped)",
         {"kind": "host", "where": "host", "certain": True}, UNKNOWN),
    Case("a mapped file",
         "RuntimeError: unable to mmap 23802932552 bytes from file <./flux1-dev.safetensors>: Cannot allocate "
         "memory (12)",
         {"kind": "mapped file", "where": "host", "requested": 23802932552}, SIZE),
]  # fmt: skip

ENDED = [
    Case("DataLoader, bus error",
         "ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared "
         "memory (shm).",
         {"kind": "dataloader", "where": "shm", "certain": True}, LIMIT),
    Case("DataLoader, killed by a bus error",
         "RuntimeError: DataLoader worker (pid 46794) is killed by signal: Bus error. It is possible that "
         "dataloader's workers are out of shared memory. Please try to raise your shared memory limit.",
         {"kind": "dataloader", "where": "shm", "certain": True, "pid": 46794, "signal": "Bus error"},
         LIMIT),
    Case("DataLoader, killed", "RuntimeError: DataLoader worker (pid 22048) is killed by signal: Killed. ",
         {"kind": "dataloader", "where": "host", "certain": False, "pid": 22048, "signal": "Killed"},
         UNKNOWN),
    Case("DataLoader, exited",
         "RuntimeError: DataLoader worker (pid(s) 12847, 12848) exited unexpectedly",
         {"kind": "dataloader", "where": "unclear", "certain": False, "pid": 12847}, UNKNOWN),
    Case("/dev/shm",
         "RuntimeError: unable to write to file </torch_18692_1954506624_0>: No space left on device (28)",
         {"kind": "shared memory", "where": "shm", "certain": True}, LIMIT),
    Case("shell", "Killed", {"kind": "shell", "where": "host", "certain": False}, UNKNOWN),
    Case("shell, by its line",
         "/var/spool/slurmd/job00191/slurm_script: line 28:  8156 Killed                  python3 main.py "
         "--prop hform --epochs 400",
         {"kind": "shell", "where": "host", "certain": False}, UNKNOWN),
    Case("zsh", "zsh: killed     python train.py", {"kind": "shell", "where": "host"}, UNKNOWN),
    Case("srun", "srun: error: falkor7: task 0: Killed", {"kind": "shell", "where": "host"}, UNKNOWN),
    Case("shell, German", "Getötet", {"kind": "shell", "where": "host"}, UNKNOWN),
    Case("torchrun",
         "E0325 20:57:27.620000 2606 site-packages/torch/distributed/elastic/multiprocessing/api.py:869] "
         "failed (exitcode: -9) local_rank: 5 (pid: 2630) of binary: /root/miniconda3/bin/python",
         {"kind": "exit code", "where": "host", "certain": False, "code": -9}, UNKNOWN),
    Case("torchrun, its summary",
         "Root Cause (first observed failure):\n[0]:\n  time      : 2025-05-21_15:43:03\n  rank      : 0 "
         "(local_rank: 0)\n  exitcode  : -9 (pid: 14750)\n  error_file: <N/A>\n  traceback : Signal 9 "
         "(SIGKILL) received by PID 14750",
         {"kind": "exit code", "where": "host", "certain": False, "line": 7}, UNKNOWN),
    Case("subprocess",
         "subprocess.CalledProcessError: Command '['python', 'train.py']' died with <Signals.SIGKILL: 9>.",
         {"kind": "exit code", "where": "host"}, UNKNOWN),
    Case("DeepSpeed",
         "[ERROR] [launch.py:321:sigkill_handler] ['python', 'train.py'] exits with return code = -9",
         {"kind": "exit code", "code": -9}, UNKNOWN),
    Case("make", "make: *** [Makefile:3: train] Error 137", {"kind": "exit code", "code": 137}, UNKNOWN),
    Case("joblib",
         "A worker process managed by the executor was unexpectedly terminated. This could be caused by a "
         "segmentation fault while calling the function or by an excessive memory usage causing the Operating "
         "System to kill the worker.",
         {"kind": "pool", "where": "unclear", "certain": False}, UNKNOWN),
    Case("a pool of processes",
         "concurrent.futures.process.BrokenProcessPool: A process in the process pool was terminated abruptly "
         "while the future was running or pending.",
         {"kind": "pool", "where": "unclear"}, UNKNOWN),
    Case("a parser of C", "pandas.errors.ParserError: Error tokenizing data. C error: out of memory",
         {"kind": "other", "where": "unclear", "certain": False}, UNKNOWN),
    Case("DataLoader, exit code 1",
         "RuntimeError: DataLoader worker (pid 123) exited unexpectedly with exit code 1. Details are lost due "
         "to multiprocessing.",
         {"kind": "dataloader", "where": "unclear", "code": 1, "pid": 123}, UNKNOWN),
    Case("bash, a job", "[1]+  Killed                  python train.py",
         {"kind": "shell", "where": "host"}, UNKNOWN),
    Case("Slurm, sacct", "JobID State ExitCode\n123 OUT_OF_ME+ 0:125", {"kind": "slurm", "line": 2}, LIMIT),
    Case("docker", "container exited with code 137",
         {"kind": "exit code", "where": "host", "certain": False, "code": 137}, UNKNOWN),
    Case("Slurm, of a batch step",
         "slurmstepd: error: Detected 1 oom-kill event(s) in StepId=191.batch cgroup. Some of your processes "
         "may have been killed by the cgroup out-of-memory handler.",
         {"kind": "slurm", "where": "host", "certain": True, "count": 1}, LIMIT),
    Case("Slurm 18", "slurmstepd: error: Detected 2 oom-kill event(s) in step 3756240.batch cgroup.",
         {"kind": "slurm", "count": 2}, LIMIT),
    Case("Slurm 23",
         "slurmstepd: error: Detected 1 oom_kill event in StepId=11300781.0. Some of the step tasks have been "
         "OOM Killed.",
         {"kind": "slurm", "count": 1}, LIMIT),
    Case("Slurm, its accounting",
         "slurmstepd-falkor7: error: Step 1141809.0 exceeded memory limit (41393168 > 20971520), being killed",
         {"kind": "slurm", "used": 41393168 << 10, "limit": 20971520 << 10}, LIMIT),
    Case("Slurm, at some point", "slurmstepd: error: Exceeded job memory limit at some point.",
         {"kind": "slurm", "where": "host"}, LIMIT),
    Case("srun, Out Of Memory", "srun: error: Orion-01-01: task 4: Out Of Memory",
         {"kind": "slurm", "where": "host", "certain": True}, LIMIT),
    Case("Kubernetes, describe",
         "    Last State:     Terminated\n      Reason:       OOMKilled\n      Exit Code:    137\n      "
         "Started:      Fri, 15 Sep 2023 09:56:14 +0200\n      Finished:     Fri, 15 Sep 2023 09:56:17 +0200\n"
         "    Ready:          False\n    Restart Count:  5\n    Limits:\n      cpu:     100m\n      memory:  "
         "50Mi\n",
         {"kind": "kubernetes", "where": "host", "certain": True, "code": 137, "limit": mib(50)}, LIMIT),
    Case("Kubernetes, a decimal unit",
         "Reason: OOMKilled\nExit Code: 137\nLimits:\n  memory: 2G\n",
         {"kind": "kubernetes", "code": 137, "limit": 2 * 10**9}, LIMIT),
    Case("kernel, a group without a limit",
         "memory: usage 1048576kB, limit 9007199254740988kB, failcnt 0\n" + "[ 7899] 0 7899 654 384 python\n" * 90
         + "Memory cgroup out of memory: Killed process 7899 (python) total-vm:2600kB, anon-rss:1500kB, "
         "file-rss:0kB, shmem-rss:0kB",
         {"kind": "kernel", "pid": 7899, "used": 1 << 30, "limit": None, "anonymous": 1500 << 10}, LIMIT),
    Case("Kubernetes, get pods",
         "tax-tribunals-application-base-74464f6b98-2kj6g      0/1     OOMKilled   4 (57s ago)   2m40s",
         {"kind": "kubernetes", "limit": None}, LIMIT),
    Case("Kubernetes, evicted",
         "The node was low on resource: memory. Container trainer was using 30118496Ki, which exceeds its "
         "request of 0.",
         {"kind": "kubernetes", "where": "host"}, SIZE),
    Case("docker inspect", '        "OOMKilled": true,', {"kind": "kubernetes"}, LIMIT),
    Case("kernel, the machine",
         "[Sun Mar 30 08:24:00 2025] oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),cpuset=/,"
         "mems_allowed=0,global_oom,task_memcg=/init.scope,task=python,pid=7899,uid=0\n[Sun Mar 30 08:24:00 "
         "2025] Out of memory: Killed process 7899 (python) total-vm:26184840kB, anon-rss:15370088kB, "
         "file-rss:0kB, shmem-rss:0kB, UID:0 pgtables:38964kB oom_score_adj:0",
         {"kind": "kernel", "where": "host", "certain": True, "pid": 7899, "name": "python",
          "virtual": 26184840 << 10, "anonymous": 15370088 << 10, "file": 0, "shared": 0,
          "constraint": "CONSTRAINT_NONE"}, SIZE),
    Case("kernel, a control group",
         "[264974.823370] memory: usage 1048576kB, limit 1048576kB, failcnt 4711\n[264974.823372] oom-kill:"
         "constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=gv,mems_allowed=0,oom_memcg=/cloudchamber/hackme/"
         "gv,task_memcg=/cloudchamber/hackme/gv,task=exe,pid=12729,uid=65534\n[264974.823440] Memory cgroup "
         "out of memory: Killed process 12729 (exe) total-vm:858156kB, anon-rss:6212kB, file-rss:19764kB, "
         "shmem-rss:0kB",
         {"kind": "kernel", "pid": 12729, "name": "exe", "anonymous": 6212 << 10, "file": 19764 << 10,
          "virtual": 858156 << 10, "limit": 1048576 << 10, "used": 1048576 << 10,
          "group": "/cloudchamber/hackme/gv", "constraint": "CONSTRAINT_MEMCG"}, LIMIT),
    Case("kernel 3.10",
         "Aug 16 20:29:54 hgzmm3cs239 kernel: Memory cgroup out of memory: Kill process 42453 (memcg_test_1) "
         "score 0 or sacrifice child\nAug 16 20:29:54 hgzmm3cs239 kernel: Killed process 42453 (memcg_test_1)"
         ", UID 0, total-vm:7296kB, anon-rss:96kB, file-rss:164kB, shmem-rss:0kB",
         {"kind": "kernel", "pid": 42453, "name": "memcg_test_1", "anonymous": 96 << 10,
          "file": 164 << 10}, LIMIT),
    Case("kernel, an old killed line",
         "Nov 30 10:16:57 node7 kernel: Killed process 799153 (python), UID 1000, total-vm:606096kB, "
         "anon-rss:68308kB, file-rss:13648kB, shmem-rss:0kB",
         {"kind": "kernel", "pid": 799153, "name": "python", "anonymous": 68308 << 10}, SIZE),
    Case("systemd-oomd",
         "12月 17 10:04:41 user systemd-oomd[588]: Killed /user.slice/user-1000.slice/app.slice/vte-spawn.scope "
         "due to memory pressure for /user.slice/user-1000.slice/user@1000.service being 57.97% > 50.00% for > "
         "20s with reclaim activity",
         {"kind": "early oom", "where": "host", "certain": True,
          "group": "/user.slice/user-1000.slice/app.slice/vte-spawn.scope"}, SIZE),
    Case("Ray", "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.",
         {"kind": "ray", "where": "host"}, LIMIT),
]  # fmt: skip

CASES = [*CUDA_OLD, *CUDA_NEW, *OTHER_DEVICES, *LIBRARIES, *HOST, *ENDED]

#: texts that are about something else, and what their refusal says
REFUSED = {
    "RuntimeError: CUDA error: device-side assert triggered\nCUDA kernel errors might be asynchronously "
    "reported": "line 1: a CUDA error: device-side assert",
    "RuntimeError: CUDA error: an illegal memory access was encountered": "illegal memory access",
    "torch.AcceleratorError: CUDA error: no kernel image is available for execution on the device":
        "torch was not built for this GPU",
    "RuntimeError: cuDNN error: CUDNN_STATUS_EXECUTION_FAILED": "a cuDNN error: a kernel failed",
    "[rank0]:[E ProcessGroupNCCL.cpp:607] Watchdog caught collective operation timeout: WorkNCCL":
        "an NCCL timeout",
    "Segmentation fault (core dumped)": "a segmentation fault",
    "RuntimeError: DataLoader worker (pid 25902) is killed by signal: Segmentation fault":
        "a segmentation fault",
    "slurmstepd: error: *** JOB 17 ON n1 CANCELLED AT 2025-01-01T00:00:00 DUE TO TIME LIMIT ***":
        "Slurm's time limit",
    "OSError: [Errno 28] No space left on device": "a full disk",
    "Traceback (most recent call last):\nKeyError: 'loss'": "line 2: a KeyError that does not "
                                                            "mention memory",
    "AttributeError: no attribute": "an AttributeError that does not mention memory",
    "epoch 1 loss 0.3\nepoch 2 loss 0.2\n": "has no out-of-memory message in 2 lines",
    "see the page about out of memory problems\n": 'mentions "out of memory" in line 1, but in no',
    "triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 131072, Hardware limit: "
    "101376.": "shared memory per multiprocessor than the GPU has",
    "DataLoader worker (pid 9) exited unexpectedly with exit code -11.": "a segmentation fault",
    '"OOMKilled": false,': "has no out-of-memory message",
    "process exited with code 1": "has no out-of-memory message",
    "process exited with code 139": "a segmentation fault in native code (exit code 139); not out of",
    "the job was killed by the user": "has no out-of-memory message",
    "": "is empty",
}  # fmt: skip
