"""optimize_fx: calls that run the graph, calls that run the module's own forward, and refusals."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import fx, nn

import tvmbridge
from tests.fx_models import Chains, Recipe, assert_agree
from tvmbridge.core.errors import CaptureError, PassError
from tvmbridge.core.pass_report import PassReport
from tvmbridge.fx.rewriting import Rewriting
from tvmbridge.fx.trial import Trial
from tvmbridge.passes.fx.base import FxPass
from tvmbridge.passes.fx.costs import Costs
from tvmbridge.passes.fx.horizontal_fusion import HorizontalFusion

RECIPE = Recipe(3, 4, 0, "split", ("norm", "drop", "tanh", "gelu", "silu", "relu"), "cat", 1, False)
FUSION = HorizontalFusion(costs=Costs(1.0, 1e18))


class Net(nn.Module):
    """Chains after a batch norm, which writes buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(12).double()
        self.chains = Chains(RECIPE)
        self.factor = 2.0

    def forward(self, x: torch.Tensor, offset: torch.Tensor | None = None) -> Any:
        y = self.chains(self.norm(x)) * self.factor
        return y if offset is None else y + offset


def sample(rows: int = 3) -> torch.Tensor:
    return torch.randn(rows, 12, dtype=torch.float64)


@pytest.fixture
def net() -> Net:
    net = Net().train()
    tvmbridge.optimize_fx(net, sample(), [FUSION], measure=False)
    return net


def own(net: nn.Module) -> nn.Module:
    return tvmbridge.remove_fx(copy.deepcopy(net))


def test_all_sizes_and_modes(net: Net) -> None:
    reference = own(net)
    for training in (True, False):
        for rows in (3, 7):
            assert_agree(net.train(training), reference.train(training), sample(rows))
    for ours, theirs in zip(net.buffers(), reference.buffers(), strict=True):
        assert torch.equal(ours, theirs)
    with torch.no_grad():
        assert torch.equal(net(sample(2)), net(sample(2))) is False
    before, after = (tvmbridge.visualize(g).source for g in tvmbridge.fx_graphs(net))
    assert before.count('label="layer_norm') == 3
    assert after.count('label="layer_norm') == 1
    report = tvmbridge.fx_report(net)
    assert report.fallbacks == {}
    assert report.calls == 6
    assert set(report.records) == {"train with gradients", "eval with gradients", "eval"}


class Sliced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(4) for _ in range(9)]).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = zip(self.norms, x.split(4, 1), strict=True)
        return torch.cat([torch.tanh(norm(part)) for norm, part in parts], 1)


def test_slices_of_an_argument_of_any_size() -> None:
    module = Sliced()
    reference = copy.deepcopy(module)
    x = torch.randn(3, 36, dtype=torch.float64)
    tvmbridge.optimize_fx(module, x, measure=False)
    _, after = tvmbridge.fx_graphs(module)
    (norm,) = after.graph.find_nodes(op="call_function", target=torch.ops.aten.layer_norm.default)
    assert norm.meta["val"].shape[1:] == (9, 4)
    assert_agree(module, reference, x)
    assert_agree(module, reference, torch.randn(5, 36, dtype=torch.float64))
    assert tvmbridge.fx_report(module).calls == 2


def test_the_module_stays_what_it_is(net: Net) -> None:
    plain = Net()
    assert list(net.state_dict()) == list(plain.state_dict())
    assert [n for n, _ in net.named_parameters()] == [n for n, _ in plain.named_parameters()]
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    net(sample()).square().sum().backward()
    optimizer.step()
    reference = own(net)
    assert_agree(net, reference, sample())
    net.load_state_dict(plain.state_dict())
    assert_agree(net, plain.train(), sample())
    net.chains.chains[1].linear = nn.Linear(4, 4).double()
    assert_agree(net, own(net), sample())
    assert tvmbridge.fx_report(net).fallbacks == {}


@pytest.mark.slow
def test_hooks_and_attributes_are_seen(net: Net) -> None:
    seen: list[int] = []
    handle = net.chains.chains[0].linear.register_forward_hook(lambda m, i, o: o * 3)
    reference = own(net)
    assert_agree(net, reference, sample())
    handle.remove()
    net.factor = 5.0
    assert_agree(net, own(net), sample())
    for parameter in net.chains.chains[2].parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: seen.append(p.numel()))
    net(sample()).sum().backward()
    assert seen


def test_other_arguments(net: Net) -> None:
    x, offset = sample(), torch.ones(12, dtype=torch.float64)
    torch.manual_seed(1)
    expected = own(net)(x, offset)
    torch.manual_seed(1)
    torch.testing.assert_close(net(x, offset=offset), expected, rtol=0, atol=1e-12)
    with pytest.raises(RuntimeError, match="17 elements"):
        net(torch.randn(3, 17, dtype=torch.float64))
    with torch.autocast("cpu"):
        net(x)
    assert any("autocast" in reason for reason in tvmbridge.fx_report(net).fallbacks)


def test_a_dispatch_has_the_graph_as_its_own_forward(net: Net) -> None:
    graph = net.__dict__["forward"]
    tvmbridge.add_tvm_dispatch(net)
    assert net.__dict__["forward"].code.original is graph
    tvmbridge.remove_tvm_dispatch(net)
    assert net.__dict__["forward"] is graph


def test_copies(net: Net, caplog: pytest.LogCaptureFixture) -> None:
    copied = copy.deepcopy(net)
    assert_agree(copied, own(net), sample())
    assert tvmbridge.fx_report(copied).calls == 1
    loaded = pickle.loads(pickle.dumps(net))
    assert_agree(loaded, own(net), sample())
    shallow = copy.copy(net)
    shallow(sample())
    (reason,) = tvmbridge.fx_report(net).fallbacks
    assert "shallow copy" in reason
    assert "not a rewritten graph" in caplog.text
    assert "use DistributedDataParallel" in caplog.text
    assert "fx_report counts such calls" in caplog.text


def test_nothing_to_do_leaves_the_module(caplog: pytest.LogCaptureFixture) -> None:
    module = nn.Linear(3, 3)
    with caplog.at_level("INFO"):
        assert tvmbridge.optimize_fx(module, torch.randn(2, 3)) is module
    assert "forward" not in module.__dict__
    assert "HorizontalFusion: nothing" in caplog.text
    with pytest.raises(ValueError, match="no fx pass has rewritten"):
        tvmbridge.fx_report(module)


class Refused(nn.Module):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.count = what, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.what == "decides" and x.sum() > 0:
            return x
        if self.what == "writes":
            self.count += 1
        if self.what == "numpy":
            return x * float(x.detach().numpy().sum())
        return torch.tanh(x)


@pytest.mark.parametrize(
    ("what", "reason"),
    [("decides", "x.sum|data"), ("writes", "count"), ("numpy", "numpy|data|cannot")],
)
def test_what_cannot_be_traced_is_refused(what: str, reason: str) -> None:
    module = Refused(what)
    with pytest.raises(CaptureError, match=reason):
        tvmbridge.optimize_fx(module, torch.randn(2, 3))
    assert "forward" not in module.__dict__


@dataclass(frozen=True)
class Wrong(FxPass):
    """A wrong pass: it changes the results."""

    def rewrite(self, graph_module: fx.GraphModule, report: PassReport) -> None:
        """Replace tanh by relu."""
        for node in graph_module.graph.nodes:
            if node.target is torch.ops.aten.tanh.default:
                node.target = torch.ops.aten.relu.default
                report.rewrote()


@dataclass(frozen=True)
class Slow(FxPass):
    """A pass that makes the graph slower, by results that nothing uses."""

    def rewrite(self, graph_module: fx.GraphModule, report: PassReport) -> None:
        """Add a hundred times the tanh of the first tanh."""
        (first,) = graph_module.graph.find_nodes(
            op="call_function", target=torch.ops.aten.tanh.default
        )
        with graph_module.graph.inserting_after(first):
            for _ in range(100):
                graph_module.graph.call_function(torch.ops.aten.tanh.default, (first,))
        report.rewrote()


def test_a_pass_that_is_wrong_is_noticed() -> None:
    module = Refused("")
    with pytest.raises(PassError, match="other results than its own forward"):
        tvmbridge.optimize_fx(module, torch.randn(2, 3), [Wrong()], measure=False)
    assert "forward" not in module.__dict__


def test_a_pass_that_makes_it_slower_is_undone() -> None:
    rewriting = Rewriting((Slow(),))
    entry = rewriting(Refused(""), None, (torch.randn(20, 30),), {}, True)
    (record,) = entry.records
    assert record.rewrites == 0
    assert "the sample takes" in record.declined[0]
    assert entry.graph_module is entry.original


def test_the_trial_leaves_everything_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[bool] = []
    genuine = Trial.slower

    def noted(self: Trial, *args: Any) -> str | None:
        called.append(True)
        genuine(self, *args)
        return None

    monkeypatch.setattr(Trial, "slower", noted)
    net = Net().train()
    before = {name: t.clone() for name, t in net.state_dict().items()}
    x = sample().requires_grad_()
    state = torch.get_rng_state()
    tvmbridge.optimize_fx(net, x, [FUSION])
    assert called
    assert torch.equal(torch.get_rng_state(), state)
    for name, tensor in net.state_dict().items():
        assert torch.equal(tensor, before[name])
    assert all(p.grad is None for p in net.parameters())


@pytest.mark.parametrize("given", [FxPass, (HorizontalFusion,), ("fold",), (3,)])
def test_what_is_no_pass_is_refused(given: Any) -> None:
    passes = given if isinstance(given, tuple) else (given,)
    with pytest.raises(TypeError, match="is no pass"):
        tvmbridge.optimize_fx(nn.ReLU(), torch.ones(2), passes)
    with pytest.raises(TypeError, match="fx_passes"):
        tvmbridge.CompileOptions(fx_passes=passes)


def test_explain_says_what_passes_do() -> None:
    options = {"fx_passes": (FUSION,)}
    report = tvmbridge.explain(Chains(RECIPE).train(), sample(), options=options)
    assert [r.name for r in report.fx_passes] == ["HorizontalFusion"]
    assert "HorizontalFusion: " in str(report)
    declined = tvmbridge.explain(nn.Linear(3, 3), torch.ones(2, 3), options=options)
    assert "HorizontalFusion: nothing" in str(declined)
    assert len(tvmbridge.fx_passes()) == 3


def test_before_tvm() -> None:
    net = Chains(RECIPE).train()
    reference = copy.deepcopy(net)
    options = {"fx_passes": (FUSION,)}
    tvmbridge.add_tvm_dispatch(net, sample(), options=options)
    (specialization,) = tvmbridge.dispatch_report(net).specializations
    record = specialization.passes[0]
    assert (record.name, record.rewrites > 0) == ("HorizontalFusion", True)
    assert_agree(net, reference, sample())
    assert tvmbridge.dispatch_report(net).fallbacks == {}
