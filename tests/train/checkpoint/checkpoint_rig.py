"""A checkpoint's makings without torch: parts with random bytes, meta, publishing in one call."""

from __future__ import annotations

import json

from flodl_shm.control.checkpoint_meta import CheckpointMeta
from flodl_shm.train.checkpoint.durable import make_folder, write_durably
from flodl_shm.train.checkpoint.folder import publish
from flodl_shm.train.checkpoint.names import MODEL, work_folder

RUN = "20250101-120000-calm-finch"


def meta(step=1, **more):
    told = {
        "save_reason": "checkpoint",
        "epoch": 1,
        "epochs": 3,
        "global_step": step,
        "reduce": 5,
        "world_size": 2,
        "ranks": (0, 1),
        "seed": 0,
        "policy": "sync",
        "batch_sizes": (4, 4),
        "samples": 64,
        "augment": 1,
        "tail": "drop",
        "digest": "d",
        "names": ("param weight 2x2 float32",),
    }
    return CheckpointMeta(**(told | more))


def tensor_bytes(values=b"\0" * 16, *, dtype="F32", shape=(4,), end=None):
    """A safetensors file of one tensor, written here by hand."""
    offsets = [0, len(values) if end is None else end]
    header = json.dumps({"x": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}).encode()
    return len(header).to_bytes(8, "little") + header + values


def parts(work, value=b"\0"):
    """Files of one rank in a work folder."""
    make_folder(work)
    return (
        write_durably(work, MODEL, [tensor_bytes(value * 16)]),
        write_durably(work, "optimizer-rank0.safetensors", [tensor_bytes(value * 16)]),
        write_durably(work, "optimizer-rank0.json", [b"{}"]),
    )


def publish_one(stem, step=1, *, save=1, run=RUN, value=None, **more):
    """Write parts and publish them as a checkpoint; its model differs by step or `value`."""
    work = work_folder(stem, run, save)
    files = parts(work, bytes([step % 251]) if value is None else value)
    return publish(stem, work, meta(step, **more), files)
