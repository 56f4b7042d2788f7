"""Predictions for the nodes, edges, pairs or graphs of a file, by the model of a run."""

from flower_fgl.simulation.prediction.calibrate import calibrate_model
from flower_fgl.simulation.prediction.explain import Explanation, explain_item
from flower_fgl.simulation.prediction.predict import predict_graph
from flower_fgl.simulation.prediction.table import (
    Prediction,
    check_ending,
    task_of,
    write_table,
)

__all__ = ["Explanation", "Prediction", "calibrate_model", "check_ending"]
__all__ += ["explain_item", "predict_graph", "task_of", "write_table"]
