"""Predictions for the nodes, edges, pairs or graphs of a file, by the model of a run."""

from flower_fgl.simulation.prediction.predict import predict_graph, predict_set
from flower_fgl.simulation.prediction.table import (
    Prediction,
    check_ending,
    task_of,
    write_table,
)

__all__ = ["Prediction", "check_ending", "predict_graph", "predict_set", "task_of"]
__all__ += ["write_table"]
