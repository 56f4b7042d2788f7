"""Complete runs with secure aggregation, with clients that fail at any message."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Context, Message, RecordDict
from safetensors import safe_open
from safetensors.torch import load_file

from flower_fgl import METHODS, Run, resume, simulate
from flower_fgl.client_app import DispatchingClientApp
from flower_fgl.client_apps.dispatch import Dispatcher
from flower_fgl.client_apps.fedavg import FedAvgClientApp
from flower_fgl.client_apps.runtime.client import Client
from flower_fgl.client_apps.runtime.session import Session
from flower_fgl.client_apps.runtime.state import FileStates, MemoryStates
from flower_fgl.core.errors import ConfigError, RunError
from flower_fgl.methods import parse_config
from flower_fgl.protocols.base import write_tensors
from flower_fgl.protocols.fedavg import Weights
from flower_fgl.protocols.secure_aggregation.additive import AdditivePayload
from flower_fgl.runs.state_files import is_secret
from flower_fgl.server_app import run_server
from flower_fgl.simulation.local import run_config_of
from flower_fgl.simulation.local_grid import LocalGrid, task_identity
from flower_fgl.strategies.aggregation import mean_of_sums
from flower_fgl.strategies.base import FglStrategy
from flower_fgl.strategies.fedavg import FedAvg
from tests.support.methods import collected
from tests.support.short_runs import SMALL

SECURE = {"secure_aggregation": True, "clients": 5}
EXCHANGES = [
    "query.secure_shares",
    "train",
    "query.secure_check",
    "query.secure_unmask",
]
Spoil = Callable[[Message], None]


def model(run: Run) -> dict[str, torch.Tensor]:
    return load_file(run.path / "model.safetensors")


def spoil(
    monkeypatch: pytest.MonkeyPatch, kind: str, pids: set[int], how: Spoil
) -> None:
    """Let some clients spoil their replies of one exchange in round 2."""
    original = Dispatcher.__call__

    def call(app: Any, message: Message, context: Context) -> Message:
        is_theirs = context.node_config["partition-id"] in pids
        is_due = message.metadata.message_type == kind and is_theirs
        if is_due:
            number = message.content.config_records["config"]["server-round"]
            is_due = number == 2
        if is_due and how is raises:  # before the client handles the message
            raises(message)
        reply = original(app, message, context)
        if is_due:
            how(reply)
        return reply

    monkeypatch.setattr(Dispatcher, "__call__", call)


def raises(reply: Message) -> None:
    raise RuntimeError("out of order")


def has_another_length(reply: Message) -> None:
    record = reply.content.array_records[secure_name(reply)]
    name = next(iter(record))
    record[name] = write_tensors({name: torch.zeros(1, dtype=torch.int64)})[name]


def has_another_type(reply: Message) -> None:
    record = reply.content.array_records[secure_name(reply)]
    name = next(iter(record))
    record[name] = write_tensors({name: torch.zeros(record[name].shape)})[name]


def is_missing(reply: Message) -> None:
    del reply.content[secure_name(reply)]


def is_noise(reply: Message) -> None:
    record = reply.content.array_records[secure_name(reply)]
    noise = torch.randint(-(2**60), 2**60, record["vector"].shape)
    record["vector"] = write_tensors({"vector": noise})["vector"]


def secure_name(reply: Message) -> str:
    (name,) = (n for n in reply.content.array_records if n.startswith("secure-"))
    return name


# ------------------------------------------------------------------- equal to plain
@pytest.mark.thorough
@pytest.mark.parametrize("method", ["fedavg", "fedprox"])
@pytest.mark.parametrize("weight_by", ["train-nodes", "nodes", "equal"])
def test_the_model_and_the_scores_are_those_of_the_plain_average(
    small: dict[str, Any], method: str, weight_by: str
) -> None:
    settings = {**small, "rounds": 4, "weight_by": weight_by, "evaluate": "both"}
    plain = simulate(method, **{**settings, "clients": 5})
    secure = simulate(method, **{**settings, **SECURE})
    for name, tensor in model(plain).items():
        # a step is 2^-24, half of it is lost on the mean; float32 rounds about as much
        torch.testing.assert_close(model(secure)[name], tensor, atol=2e-6, rtol=2e-6)
    for one, other in zip(plain.rounds, secure.rounds, strict=True):
        assert one["metrics"] == other["metrics"]
        assert other["failures"] == []


def test_the_mean_is_the_plain_one_within_half_a_step(
    generator: torch.Generator,
) -> None:
    from fractions import Fraction

    from flower_fgl.protocols.secure_aggregation.quantization import decode, encode

    weights = [3.0, 1.0, 7.0, 20.0]
    payloads = [Weights({"w": torch.randn(50, generator=generator)}) for _ in weights]
    shapes = Weights.summand_shapes({"w": (50,)})
    vectors = [
        encode(payload.summands(weight), fraction_bits=16, summands=4)
        for payload, weight in zip(payloads, weights, strict=True)
    ]
    sums = decode(sum(vectors), shapes, fraction_bits=16)  # type: ignore[arg-type]
    mean = mean_of_sums(sums, 31.0, ["w"])["w"]
    bound = Fraction(4, 2 * 31 * 2**16)  # K/2 steps over Σ n_k
    for i in range(50):
        exact = sum(
            Fraction(weight) * Fraction(float(payload.tensors["w"][i]))
            for payload, weight in zip(payloads, weights, strict=True)
        ) / Fraction(31)
        rounding = Fraction(2**-24) * abs(Fraction(float(mean[i])))  # to float32
        assert abs(Fraction(float(mean[i])) - exact) <= bound + rounding


def test_weights_that_are_not_those_described_fail_the_round() -> None:
    from flower_fgl.core.errors import PayloadError

    sums = {"weight": torch.tensor(5.0), "weights/w": torch.zeros(2)}
    with pytest.raises(
        PayloadError, match=r"add up to 4, the total of .* descriptions, got 5"
    ):
        mean_of_sums(sums, 4.0, ["w"])


def test_a_run_gives_the_same_numbers_again_although_keys_are_new(
    small: dict[str, Any],
) -> None:
    first, second = (simulate(**{**small, **SECURE}) for _ in range(2))
    for name, tensor in model(first).items():
        assert torch.equal(model(second)[name], tensor)
    for one, other in zip(first.rounds, second.rounds, strict=True):
        assert (one["metrics"], one["bytes"]) == (other["metrics"], other["bytes"])
    assert not any("public_key" in row for row in first.clients)


def test_a_run_resumes_from_a_checkpoint_with_new_keys(
    small: dict[str, Any], tmp_path: Path
) -> None:
    settings = {**small, **SECURE, "rounds": 5, "checkpoint_every": 2}
    whole = simulate("fedavg", **settings)

    def stop(row: Any) -> None:
        if row["round"] == 4:
            raise KeyboardInterrupt

    folder = tmp_path / "stopped"
    with pytest.raises(KeyboardInterrupt):
        simulate("fedavg", **settings, run_dir=str(folder), on_round=stop)
    resumed = resume(folder)
    for one, other in zip(whole.rounds, resumed.rounds, strict=True):
        assert one["metrics"] == other["metrics"]
        assert other["failures"] == []


@pytest.mark.parametrize("state", ["file", "memory"])
def test_no_checkpoint_and_no_kept_state_holds_a_secret(
    small: dict[str, Any], tmp_path: Path, state: str
) -> None:
    settings = {k: v for k, v in small.items() if k != "clients"}
    folder = tmp_path / "states"
    values = run_config_of(
        method="fedavg", dataset="synthetic", clients=4, seed=0,
        settings={
            **settings, "rounds": 3, "secure_aggregation": True, "checkpoint_every": 1,
            "keep_checkpoint": True, "state_dir": str(folder) if state == "file" else "",
        },
    )  # fmt: skip
    with task_identity(9):
        session = Session(memory=None if state == "file" else MemoryStates())
        grid = LocalGrid(DispatchingClientApp(session), 4, values, run_id=9)
        run = Run.load(run_server(grid, values, engine="local", states=session.memory))
    current = {folder / f"9-{pid:06d}.safetensors" for pid in range(4)}
    files = [*tmp_path.rglob("*.safetensors")]
    kept = [path for path in files if path not in current]
    assert len(kept) > 4
    for path in kept:
        with safe_open(path, "pt") as file:
            secrets = {name for name in file.keys() if is_secret(name)}  # noqa: SIM118
        assert not secrets, path
    assert run.summary["status"] == "completed"


def test_it_goes_with_partial_participation_and_evaluation_of_the_rest(
    small: dict[str, Any],
) -> None:
    settings = {**small, "participation": 0.5, "rounds": 4}
    plain = simulate(**{**settings, "clients": 6})
    secure = simulate(**{**settings, **SECURE, "clients": 6})
    assert [row["replies"] for row in secure.rounds] == [3] * 4
    for one, other in zip(plain.rounds, secure.rounds, strict=True):
        assert one["metrics"] == other["metrics"]


def test_finetuning_uploads_nothing(small: dict[str, Any]) -> None:
    settings = {**small, **SECURE, "fedavg": {"finetune_epochs": 2}}
    plain = simulate(**{**settings, "secure_aggregation": False})
    secure = simulate(**settings)
    for run in (plain, secure):
        assert set(run.rounds[-1]["bytes"]["up"]) == {"metrics"}
    assert secure.summary["finetuned"] == plain.summary["finetuned"]


@pytest.mark.parametrize("state", ["file", "context"])
def test_secrets_survive_between_the_exchanges_wherever_states_are_kept(
    small: dict[str, Any], tmp_path: Path, state: str
) -> None:
    expected = simulate(**{**small, **SECURE})
    settings = {k: v for k, v in small.items() if k != "clients"}
    folder = str(tmp_path / "states") if state == "file" else ""
    values = run_config_of(
        method="fedavg", dataset="synthetic", clients=5, seed=0,
        settings={**settings, "secure_aggregation": True, "state_dir": folder},
    )  # fmt: skip
    with task_identity(9):
        grid = LocalGrid(DispatchingClientApp(Session()), 5, values, run_id=9)
        run = Run.load(run_server(grid, values, engine="local"))
        kept = [
            FileStates(Path(folder)).load(context, pid).group("secure")
            if folder
            else dict(context.state.array_records["state-tensors"])
            for pid, context in enumerate(grid.contexts.values())
        ]
    assert run.rounds[-1]["metrics"] == expected.rounds[-1]["metrics"]
    assert torch.equal(*(next(iter(model(r).values())) for r in (run, expected)))
    for memory in kept:  # all secrets of the round are deleted
        left = {name.removeprefix("secure/") for name in memory}
        assert {"run-key", "card", "masked-round"} <= left
        assert not left & {"seed", "mask-secret", "held", "pairs", "seen"}


# --------------------------------------------------------------- what crosses the wire
def test_only_masked_vectors_and_keys_cross_the_wire(
    monkeypatch: pytest.MonkeyPatch, small: dict[str, Any]
) -> None:
    seen: dict[str, set[str]] = {}
    original = Dispatcher.__call__

    def call(app: Any, message: Message, context: Context) -> Message:
        reply = original(app, message, context)
        kind = message.metadata.message_type
        seen.setdefault(f"{kind} down", set()).update(message.content)
        seen.setdefault(f"{kind} up", set()).update(reply.content)
        return reply

    monkeypatch.setattr(Dispatcher, "__call__", call)
    simulate(**{**small, **SECURE})
    assert seen == {
        "query.describe down": set(),
        "query.describe up": {"info"},
        "query.secure_shares down": {"config", "secure-roster"},
        "query.secure_shares up": {"secure-offer"},
        "train down": {"config", "weights", "secure-peers"},
        "train up": {"metrics", "secure-sum"},
        "query.secure_check down": {"config", "secure-survivors"},
        "query.secure_check up": {"secure-tags"},
        "query.secure_unmask down": {"config", "secure-confirmations"},
        "query.secure_unmask up": {"secure-reveal"},
    }


def test_bytes_are_those_of_the_formulas(small: dict[str, Any]) -> None:
    run = simulate(**{**small, **SECURE})
    parameters, n = 8 * 8 + 8 + 8 * 3 + 3, 5
    formulas = {
        ("up", "secure-offer"): 48 + 158 * n,
        ("up", "secure-tags"): 16 * n,
        ("down", "secure-confirmations"): 24 * n,
        ("up", "secure-sum"): 8 * (parameters + 2),
        ("up", "secure-reveal"): 33 * n,
        ("down", "secure-roster"): 40 * n,
        ("down", "secure-peers"): 134 * n,
        ("down", "secure-survivors"): 8 * n,
    }
    for row in run.rounds:
        for (way, name), size in formulas.items():
            assert size <= row["bytes"][way][name] / n <= size + 4 * 300  # headers


# ------------------------------------------------------------------ clients that fail
@pytest.mark.thorough
@pytest.mark.parametrize("kind", EXCHANGES)
@pytest.mark.parametrize("pids", [{1}, {0, 4}])
def test_lost_clients_are_named_and_the_round_continues(
    monkeypatch: pytest.MonkeyPatch, small: dict[str, Any], kind: str, pids: set[int]
) -> None:
    settings = {**small, **SECURE, "rounds": 3, "clients": 7}
    spoil(monkeypatch, kind, pids, raises)
    secure = simulate(**settings)
    row = secure.rounds[1]
    assert row["status"] == "ok"
    assert {f["partition_id"] for f in row["failures"]} == pids
    assert all("out of order" in f["reason"] for f in row["failures"])
    if kind in EXCHANGES[2:]:  # a client that drops out now is in the sum
        monkeypatch.undo()
        expected = simulate(**{**settings, "secure_aggregation": False})
        assert row["replies"] == 7
    else:
        monkeypatch.undo()
        spoil(monkeypatch, "train", pids, raises)
        expected = simulate(**{**settings, "secure_aggregation": False})
        assert row["replies"] == 7 - len(pids)
    for name, tensor in model(expected).items():
        torch.testing.assert_close(model(secure)[name], tensor, atol=2e-6, rtol=2e-6)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", EXCHANGES)
@pytest.mark.parametrize(
    ("how", "reason"),
    [
        (has_another_length, "shape"),
        (has_another_type, "must be torch"),
        (is_missing, "no array record"),
    ],
)
def test_a_client_that_sends_garbage_is_named_and_treated_as_lost(
    monkeypatch: pytest.MonkeyPatch,
    small: dict[str, Any],
    kind: str,
    how: Spoil,
    reason: str,
) -> None:
    spoil(monkeypatch, kind, {2}, how)
    run = simulate(**{**small, **SECURE, "rounds": 3})
    assert [row["status"] for row in run.rounds] == ["ok"] * 3
    (failure,) = run.rounds[1]["failures"]
    assert failure["partition_id"] == 2
    assert reason in failure["reason"]


def test_a_model_that_is_not_finite_is_stopped_at_the_client(
    monkeypatch: pytest.MonkeyPatch, small: dict[str, Any]
) -> None:
    original = FedAvgClientApp.fit

    def fit(app: Any, client: Client, number: int, download: Any) -> Any:
        result = original(app, client, number, download)
        if client.partition_id == 3 and number == 2:
            next(iter(result.upload.tensors.values())).view(-1)[0] = float("nan")
        return result

    monkeypatch.setattr(FedAvgClientApp, "fit", fit)
    run = simulate(**{**small, **SECURE, "rounds": 3})
    (failure,) = run.rounds[1]["failures"]
    assert failure["partition_id"] == 3
    assert "non-finite" in failure["reason"]
    assert [row["replies"] for row in run.rounds] == [5, 4, 5]


def test_a_number_that_cannot_be_encoded_is_an_error_that_names_it(
    monkeypatch: pytest.MonkeyPatch, small: dict[str, Any]
) -> None:
    original = Weights.summands

    def summands(payload: Weights, weight: float) -> dict[str, torch.Tensor]:
        return {**original(payload, weight), "weight": torch.tensor(1e13)}

    monkeypatch.setattr(Weights, "summands", summands)
    with pytest.raises(RunError, match=r'"weight" holds a number outside \['):
        simulate(**{**small, **SECURE})


def test_noise_instead_of_a_masked_vector_fails_the_round_and_keeps_the_model(
    monkeypatch: pytest.MonkeyPatch, small: dict[str, Any]
) -> None:
    spoil(monkeypatch, "train", {2}, is_noise)
    run = simulate(**{**small, **SECURE, "rounds": 3})
    assert [row["status"] for row in run.rounds] == ["ok", "failed", "ok"]
    assert "masks did not cancel" in run.rounds[1]["reason"]


@pytest.mark.parametrize("kind", EXCHANGES)
def test_fewer_survivors_than_the_threshold_fail_the_round(
    monkeypatch: pytest.MonkeyPatch, small: dict[str, Any], kind: str
) -> None:
    spoil(monkeypatch, kind, {0, 2}, raises)  # 3 of 5 are left, ⌊10/3⌋ + 1 = 4
    run = simulate(**{**small, **SECURE, "rounds": 3})
    assert [row["status"] for row in run.rounds] == ["ok", "failed", "ok"]
    assert (
        "4 are needed" in run.rounds[1]["reason"]
        or "4 of 5 are needed" in (run.rounds[1]["reason"])
    )


def test_a_run_below_the_threshold_ends_with_an_error_that_says_so(
    monkeypatch: pytest.MonkeyPatch, small: dict[str, Any]
) -> None:
    original = Dispatcher.__call__

    def call(app: Any, message: Message, context: Context) -> Message:
        is_train = message.metadata.message_type == "train"
        if is_train and context.node_config["partition-id"] in (0, 1):
            raise RuntimeError("out of order")
        return original(app, message, context)

    monkeypatch.setattr(Dispatcher, "__call__", call)
    with pytest.raises(
        RunError, match=r"3 of 5 clients sent a masked sum, 4 are needed"
    ):
        simulate(**{**small, **SECURE, "rounds": 5})


# --------------------------------------------------------------------------- settings
def test_a_method_that_needs_more_than_sums_names_those_that_do_not() -> None:
    for name, row in METHODS.items():
        values = {"method": name, "secure-aggregation": True}
        if row.additive:
            assert parse_config(values).secure_aggregation
        else:
            with pytest.raises(
                ConfigError, match=r"These methods support it: .*fedavg, "
            ):
                parse_config(values)


def test_a_row_is_additive_if_and_only_if_its_upload_can_be_summed() -> None:
    look_closer = collected("LOOKS_CLOSER")
    for name, row in METHODS.items():
        strategy = row.load_strategy()
        can_be_summed = issubclass(strategy.up, AdditivePayload)
        assert row.additive == (can_be_summed and name not in look_closer)
        overrides = strategy.aggregate_sums is not FglStrategy.aggregate_sums
        assert overrides or not row.additive


def test_a_rule_of_its_own_with_anothers_sums_is_refused(
    small: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    class WithMomentum(FedAvg):
        def aggregate(self, server_round: int, uploads: Any) -> None:
            super().aggregate(server_round, uploads)

    monkeypatch.setattr(
        type(METHODS["fedavg"]), "load_strategy", lambda self: WithMomentum
    )
    with pytest.raises(RunError, match="WithMomentum defines aggregate but inherits"):
        simulate(**{**small, **SECURE})


@pytest.mark.parametrize(("clients", "participation"), [(1, 1.0), (2, 1.0), (5, 0.4)])
def test_fewer_than_three_clients_a_round_are_refused(
    clients: int, participation: float
) -> None:
    values = {
        "secure-aggregation": True,
        "clients": clients,
        "participation": participation,
    }
    with pytest.raises(ConfigError, match="needs 3 clients per round"):
        parse_config(values)


def test_fewer_than_three_clients_that_can_train_are_refused(
    small: dict[str, Any],
) -> None:
    values = run_config_of(
        method="fedavg", dataset="synthetic", clients=0, seed=0,
        settings={**small, "clients": 0, "secure_aggregation": True},
    )  # fmt: skip
    with task_identity(9):
        session = Session(memory=MemoryStates())
        grid = LocalGrid(DispatchingClientApp(session), 2, values, run_id=9)
        with pytest.raises(RunError, match="3 sampled clients per round"):
            run_server(grid, values, engine="local")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("secure-threshold", 0.5),
        ("secure-threshold", 0.66),
        ("secure-threshold", 1.1),
        ("secure-fraction-bits", 0),
        ("secure-fraction-bits", 41),
    ],
)
def test_settings_out_of_range_are_refused(key: str, value: float) -> None:
    with pytest.raises(ConfigError, match=key):
        parse_config({key: value, "secure-aggregation": True})


def test_a_client_without_the_setting_answers_no_request(small: dict[str, Any]) -> None:
    values = run_config_of(
        method="fedavg", dataset="synthetic", clients=3, seed=0, settings=SMALL
    )
    with task_identity(9):
        grid = LocalGrid(DispatchingClientApp(Session()), 3, values, run_id=9)
        node = grid.get_node_ids()[0]
        message = Message(RecordDict(), node, "query.secure_shares")
        (reply,) = grid.send_and_receive([message])
        assert "secure-aggregation is off on this client" in reply.error.reason
