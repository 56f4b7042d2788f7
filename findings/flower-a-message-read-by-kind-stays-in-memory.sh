#!/usr/bin/env bash
# flwr 1.42.0: a message that is read through content.array_records is not freed with its last reference.
#
# array_records, config_records and metric_records return an object that refers to itself and to the message's content.
# So uploads that a strategy has read in this way stay in memory until Python's collector of cycles runs. It counts
# objects, of which a message of 20 MB has a few, and not bytes: here 40 messages are all still there. Read by name,
# content["weights"], each is freed at once. Flower's own strategies read by kind.
#
# Output seen:
#   after 40 messages of 20 MB: read by name 80 MB or less, read by kind 800 MB or more, after gc.collect() 80 MB or less
set -euo pipefail
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
python3 -m venv "$scratch/venv"
"$scratch/venv/bin/pip" install --quiet numpy==2.4.6 psutil==7.2.2 flwr==1.42.0
FLWR_HOME="$scratch/flwr" FLWR_TELEMETRY_ENABLED=0 "$scratch/venv/bin/python" -W ignore - <<'END'
import gc

import numpy as np
import psutil
from flwr.app import ArrayRecord, RecordDict


def grown(read):
    """Return the megabytes in use after messages of which only the last one is still referred to."""
    gc.collect()
    before = psutil.Process().memory_info().rss
    for _ in range(40):
        kept = read(RecordDict({"weights": ArrayRecord([np.zeros(5_000_000, dtype=np.float32)])}))
    used = psutil.Process().memory_info().rss - before
    assert len(kept) == 1
    del kept
    gc.collect()
    return used / 1e6, (psutil.Process().memory_info().rss - before) / 1e6


by_name, _ = grown(lambda content: content["weights"])
by_kind, collected = grown(lambda content: content.array_records["weights"])


def about(megabytes):
    return "80 MB or less" if megabytes < 81 else "800 MB or more" if megabytes > 799 else f"{megabytes:.0f} MB"


print(
    f"after 40 messages of 20 MB: read by name {about(by_name)}, read by kind {about(by_kind)}, "
    f"after gc.collect() {about(collected)}"
)
assert by_name < 81 and by_kind > 799 and collected < 81
END
