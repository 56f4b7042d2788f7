"""How much scores drop without the edges that an explanation names.

One run of FedAvg on the synthetic graph; some nodes of the first client are explained with
the aggregated model. The lines are means over the nodes that at least 30 edges influence.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from statistics import fmean

from flower_fgl import simulate
from flower_fgl.datasets.graph_files.graph_file import save_client_graph
from flower_fgl.datasets.store import open_store
from flower_fgl.methods import parse_config
from flower_fgl.simulation.local import run_config_of
from flower_fgl.simulation.prediction import explain_item

CLIENTS = 3


def main() -> None:
    """Train, explain, and print the means."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=20)
    number = parser.parse_args().nodes
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run = simulate("fedavg", clients=CLIENTS, rounds=5, run_dir=str(folder / "run"))
        values = run_config_of(
            method="fedavg", dataset="synthetic", clients=CLIENTS, seed=0, settings={}
        )
        client = open_store(parse_config(values), CLIENTS).load(0)
        save_client_graph(folder / "0.npz", client)
        ids = client.node_ids[:: len(client.node_ids) // number].tolist()[:number]
        found = [explain_item(run.path, folder / "0.npz", [str(k)]) for k in ids]
    found = [one for one in found if len(one.drawing) >= 30]
    means = {
        "nodes": float(len(found)),
        "score": fmean(one.score for one in found),
        "drop without any edge": fmean(one.score - one.without_edges for one in found),
        "drop without the named edges": fmean(one.drop for one in found),
        "drop without the edges of the masks": fmean(one.mask_drop for one in found),
        "drop without random edges": fmean(fmean(one.random_drops) for one in found),
        "overlap of the masks": fmean(one.overlap for one in found),
    }
    for title, value in means.items():
        print(f"{title}: {value:.3f}")


if __name__ == "__main__":
    main()
