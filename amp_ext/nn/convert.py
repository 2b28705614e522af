"""From the layers of this package to torch's own."""

import operator
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

from torch import fx, nn
from torch.nn import functional as F

from amp_ext.nn.gated_mlp import GatedMLP
from amp_ext.nn.linear import Linear, LinearActivation
from amp_ext.nn.mlp import MLP

_LAYERS = (Linear, LinearActivation, MLP, GatedMLP)
_ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "gelu_tanh": lambda: nn.GELU(approximate="tanh"),
    "silu": nn.SiLU,
}


def to_torch(module: nn.Module) -> nn.Module:
    """Turns the layers of ``amp_ext.nn`` in a module into torch's own, in place.

    Each stays the object that it is, with its parameters, its hooks and all that refers to it. It
    becomes an instance of another class, which needs no amp_ext to be computed or unpickled:

    - a :class:`Linear`, or a :class:`LinearActivation` without an activation, of
      ``torch.nn.Linear``;
    - an :class:`MLP` of ``torch.nn.Sequential``, with the modules ``fc1``, ``activation``,
      ``dropout`` and ``fc2``, of which it may lack the two in the middle;
    - another :class:`LinearActivation`, or a :class:`GatedMLP`, of ``torch.fx.GraphModule``: no
      other module of torch has their parameters under the same names. Where such a module is copied
      or pickled, torch drops the hooks of the layer itself, but no parameter.

    The state dict stays as it is, and results agree up to roundings. To keep a module, convert a
    copy: ``to_torch(copy.deepcopy(module))``. Compile it afterwards: what has been
    compiled of it before is of other classes.

    Args:
        module: any module; it may be one of the layers itself.

    Returns:
        The same module.

    Raises:
        TypeError: a layer is of a subclass of one of ours, as it is after ``fully_shard`` or with a
            parametrization; has a ``forward`` of its own, as from tools that wrap layers; or is an
            :class:`MLP` with modules beside its two. Then nothing has changed.
    """
    named = [(n, m) for n, m in module.named_modules() if isinstance(m, _LAYERS)]
    for layer, form in [(layer, _form_of(name, layer)) for name, layer in named]:
        for option in ("activation", "dropout"):
            layer.__dict__.pop(option, None)
        layer.__class__ = form.of
        layer.__dict__.update(form.attributes)
        layer._modules = OrderedDict(form.modules)
    return module


class _Form(NamedTuple):
    """What a layer becomes: its class, and what an instance of that has to have."""

    of: type[nn.Module]
    modules: dict[str, nn.Module]
    attributes: dict[str, object]


def _form_of(name: str, layer: nn.Module) -> _Form:
    where = f"amp_ext.nn.to_torch: {name or 'the module'}"
    if type(layer) not in _LAYERS:
        ours = next(base for base in type(layer).__mro__ if base in _LAYERS)
        raise TypeError(
            f"{where} must be an amp_ext.nn.{ours.__name__} itself, got the subclass "
            f"{type(layer).__name__}: convert before layers are parametrized or sharded"
        )
    if "forward" in layer.__dict__:
        raise TypeError(
            f"{where} must have the forward of its class, got one of its own: convert before tools "
            "wrap layers"
        )
    between = _between(layer)
    if isinstance(layer, MLP):
        if unknown := layer._modules.keys() - {"fc1", "fc2"}:
            raise TypeError(
                f"{where} must have no modules but fc1 and fc2, got {', '.join(sorted(unknown))}"
            )
        return _Form(nn.Sequential, {"fc1": layer.fc1, **between, "fc2": layer.fc2}, {})
    modules = {**layer._modules, **between}
    if isinstance(layer, Linear) or (isinstance(layer, LinearActivation) and not between):
        return _Form(nn.Linear, modules, {})
    return _traced(layer, modules)


def _between(layer: nn.Module) -> dict[str, nn.Module]:
    """Modules for a layer's options."""
    modules = {}
    if getattr(layer, "activation", "none") != "none":
        modules["activation"] = _ACTIVATIONS[layer.activation]().train(layer.training)
    if getattr(layer, "dropout", 0) > 0:
        modules["dropout"] = nn.Dropout(layer.dropout).train(layer.training)
    return modules


def _traced(layer: LinearActivation | GatedMLP, modules: dict[str, nn.Module]) -> _Form:
    """A GraphModule has a class of its own, and so does what becomes one."""
    graph = fx.Graph()
    x = graph.placeholder("input")

    def called(name: str, x: fx.Node) -> fx.Node:
        return graph.call_module(name, (x,)) if name in modules else x

    if isinstance(layer, LinearActivation):
        parameters = ("weight",) if layer.bias is None else ("weight", "bias")
        x = graph.call_function(F.linear, (x, *(graph.get_attr(name) for name in parameters)))
        x = called("activation", x)
    else:
        gate = called("activation", called("gate_proj", x))
        x = graph.call_function(operator.mul, (gate, called("up_proj", x)))
        x = called("down_proj", called("dropout", x))
    graph.output(x)
    named = [node.target for node in graph.nodes if node.op in ("get_attr", "call_module")]
    found = {name: modules[name] if name in modules else getattr(layer, name) for name in named}
    made = fx.GraphModule(found, graph)
    graph.owning_module = layer
    usual = vars(nn.Module()).keys()
    return _Form(type(made), modules, {k: v for k, v in vars(made).items() if k not in usual})
