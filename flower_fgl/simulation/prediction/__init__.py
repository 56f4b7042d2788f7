"""Predictions for the nodes, edges, pairs or graphs of a file, by the model of a run."""

from flower_fgl.simulation.prediction.explain import Explanation, explain_item
from flower_fgl.simulation.prediction.predict import predict_graph, predict_set
from flower_fgl.simulation.prediction.table import (
    Prediction,
    check_ending,
    task_of,
    write_table,
)

__all__ = ["Explanation", "Prediction", "check_ending", "explain_item", "predict_graph"]
__all__ += ["predict_set", "task_of", "write_table"]
