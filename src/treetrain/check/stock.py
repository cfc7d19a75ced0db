"""Tells what comes with the packages that a model is made of from what a user has added."""

STOCK = ("transformers", "torch", "peft", "treetrain", "bitsandbytes", "torchao", "accelerate", "deepspeed", "trl")
"""Packages whose modules and attention are not a user's own."""


def is_stock(owner: object) -> bool:
    """Whether a function, class or object comes with the packages that a model is made of."""
    function = getattr(owner, "__func__", owner)  # `functools.wraps` copies the name of another module
    module = getattr(function, "__globals__", {}).get("__name__") or getattr(owner, "__module__", None)
    return (module or type(owner).__module__).partition(".")[0] in STOCK


def hook_name(hook: object) -> str:
    """The name that a user gave the function or class of a hook."""
    return getattr(hook, "__qualname__", type(hook).__qualname__).rpartition("<locals>.")[2]
