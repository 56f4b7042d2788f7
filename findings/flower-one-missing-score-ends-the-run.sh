#!/usr/bin/env bash
# flwr 1.42.0: one client that leaves out one score ends the run of all clients.
#
# FedAvg compares the names of the metrics of all replies. Where one reply lacks a name, it raises
# InconsistentMessageReplies: the text says that the aggregation is skipped, but nothing catches the error, and the
# ServerApp ends in that round. A client whose nodes all have one class has no AUROC, so a correct client that leaves it
# out stops the training of everybody. NaN in its place makes the average NaN and keeps the weights.
#
# Output seen:
#   all report auroc: weights [3.0], auroc 0.70
#   one reports NaN: weights [3.0], auroc nan
#   one leaves auroc out: InconsistentMessageReplies out of start()
set -euo pipefail
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
python3 -m venv "$scratch/venv"
"$scratch/venv/bin/pip" install --quiet flwr==1.42.0 numpy==2.4.6
"$scratch/venv/bin/python" - 2>/dev/null <<'END'
import math

import numpy
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.exception import InconsistentMessageReplies
from flwr.serverapp.strategy import FedAvg
from flwr.supercore.task_identity import TaskIdentity

TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1  # what a ServerApp process sets


class TwoClients(Grid):
    """Two clients that answer at once, with one weight and one score each."""

    def __init__(self, *scores):
        self.answers = dict(zip((2, 4), scores))

    run = set_run = create_message = push_messages = pull_messages = None  # not needed here

    def get_node_ids(self):
        return list(self.answers)

    def send_and_receive(self, messages, **_):
        return [self.answer(message) for message in messages]

    def answer(self, message):
        node = message.metadata.dst_node_id
        score = self.answers[node]
        metrics = {"num-examples": 10} | ({} if score is None else {"auroc": score})
        arrays = ArrayRecord({"weight": Array(numpy.array([float(node)]))})
        content = RecordDict({"arrays": arrays, "metrics": MetricRecord(metrics)})
        return Message(content, reply_to=message)


def train(*scores):
    strategy = FedAvg(fraction_evaluate=0.0)
    start = ArrayRecord({"weight": Array(numpy.zeros(1))})
    result = strategy.start(TwoClients(*scores), start, num_rounds=1)
    return result.arrays["weight"].numpy().tolist(), result.train_metrics_clientapp[1]["auroc"]


for name, scores in (("all report auroc", (0.6, 0.8)), ("one reports NaN", (0.6, math.nan))):
    weights, score = train(*scores)
    print(f"{name}: weights {weights}, auroc {score:.2f}")
    assert weights == [3.0]
assert math.isnan(score)
try:
    train(0.6, None)
except InconsistentMessageReplies as error:
    print(f"one leaves auroc out: {type(error).__name__} out of start()")
else:
    raise AssertionError("no error")
END
