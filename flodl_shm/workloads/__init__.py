"""Ready models on data that is already on the machine, by name.

A workload's `build` gives the keyword arguments of a Trainer. Listing the names imports no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from flodl_shm.errors import BadConfig

if TYPE_CHECKING:
    from collections.abc import Mapping

DEFAULT = "char-gpt"

# name -> (module, function, what it is)
_HOMES = {
    "char-gpt": ("char_gpt", "build", "a small GPT on Python's own documentation text"),
    "char-rnn": ("char_rnn", "build", "a GRU on the same text"),
    "digits-logistic": ("digits", "build_logistic", "one linear layer on scikit-learn's digits"),
    "digits-mlp": ("digits", "build_mlp", "a perceptron on the same digits"),
    "digits-lenet": ("digits", "build_lenet", "a BatchNorm conv net on the same digits"),
    "digits-resnet": ("digits", "build_resnet", "a residual conv net on the same digits"),
    "digits-ae": ("digits", "build_autoencoder", "an autoencoder of the same digits"),
    "paced": ("paced", "build", "a tiny real step, then a wait: a stand-in for a GPU"),
}
NAMES = tuple(_HOMES)


def describe(name: str) -> str:
    """A few words on a workload of NAMES."""
    return _HOMES[name][2]


def check(name: str) -> None:
    """Raise BadConfig for a name that is no workload. Imports nothing."""
    if name not in _HOMES:
        raise BadConfig(f"there is no workload {name!r}", hint=f"Choose one of {', '.join(NAMES)}.")


def build(name: str, /, **options: Any) -> dict[str, Any]:
    """Keyword arguments for Trainer, all of them: `Trainer(**build("paced", picks=100))`.

    Raises BadConfig for an unknown name or option, and if the data need an extra that is missing.
    """
    check(name)
    module, function, _ = _HOMES[name]
    make = getattr(import_module(f"{__name__}.{module}"), function)
    arguments: dict[str, Any] = make(options)
    return arguments


def refuse_options(name: str, options: Mapping[str, Any]) -> None:
    """For workloads without options of their own."""
    for option in options:
        raise BadConfig(f"workload {name} has no option {option!r}", hint="Leave it out.")
