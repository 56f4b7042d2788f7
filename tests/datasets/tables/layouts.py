"""Small tables in the layouts of public datasets, and a table of accounts."""

from __future__ import annotations

from pathlib import Path

import numpy as np

LARGE = 1_000_000_000_000_000_001
"""Account number that a float cannot hold."""

ACCOUNTS = f"""account,opened,balance,country,business,holder,fraud
{LARGE},2019-05-02,120.5,AT,no,h1,0
{LARGE + 1},2020-01-17,,DE,yes,h2,1
{LARGE + 2},,15000,AT,no,h3,0
{LARGE + 3},2021-11-30,88,FR,no,h4,
"""
TRANSFERS = f"""from,to,amount
{LARGE},{LARGE + 1},10
{LARGE + 1},{LARGE + 2},20
{LARGE + 3},9000000000000000009,30
"""
RECIPE = """
vocabulary = "vocabulary.toml"
foreign = "flag"

[[nodes]]
table = "accounts*.csv"
[nodes.columns]
account = "id"
opened = {kind = "date", missing = "median"}
balance = {kind = "number", missing = "mean", log = true}
country = "category"
business = "yes/no"
holder = "ignore"
fraud = {kind = "label", classes = {1 = "fraud", 0 = "ok"}}

[[edges]]
table = "transfers.csv"
[edges.columns]
from = "source"
to = "target"
amount = "ignore"
"""
VOCABULARY = """
[nodes.numbers]
opened = {mean = 18000.0, std = 400.0, median = 18278.0}
balance = {mean = 6.0, std = 2.0, median = 5.0}
[nodes.categories]
country = ["AT", "DE"]
"""


def write(folder: Path, **files: str) -> list[Path]:
    """Write files; an underscore before csv, toml and so on is a dot."""
    paths = [folder / ".".join(name.rsplit("_", 1)) for name in files]
    for path, text in zip(paths, files.values(), strict=True):
        path.write_text(text, "utf-8")
    return paths


def bank(folder: Path, **changed: str) -> tuple[Path, list[Path]]:
    """Write recipe, vocabulary and tables of a bank; return recipe and tables."""
    files = {"recipe_toml": RECIPE, "vocabulary_toml": VOCABULARY}
    files |= {"accounts_csv": ACCOUNTS, "transfers_csv": TRANSFERS}
    recipe, _, *tables = write(folder, **files | changed)
    return recipe, tables


def elliptic(folder: Path) -> list[Path]:
    """Write 8 transactions over all periods, 2 of them without a class."""
    steps = [1, 1, 20, 29, 30, 34, 35, 49]
    rows = [
        ",".join(
            [str(230425980 + i), str(step), *(f"{(i + j) / 7 - 9}" for j in range(165))]
        )
        for i, step in enumerate(steps)
    ]
    classes = ["unknown", "1", "2", "1", "2", "2", "1", "unknown"]
    listed = [f"{230425980 + i},{name}" for i, name in enumerate(classes)]
    edges = [f"{230425980 + i},{230425981 + i}" for i in range(7)]
    return write(
        folder,
        elliptic_txs_features_csv="\n".join(rows) + "\n",
        elliptic_txs_classes_csv="\n".join(["txId,class", *listed]) + "\n",
        elliptic_txs_edgelist_csv="\n".join(["txId1,txId2", *edges]) + "\n",
    )


def ibm_aml(folder: Path) -> list[Path]:
    """Write 4 transactions, not in order of time; bank 010 and bank 10 differ."""
    header = (
        "Timestamp,From Bank,Account,To Bank,Account,Amount Received,Receiving Currency,"
        "Amount Paid,Payment Currency,Payment Format,Is Laundering\n"
    )
    rows = (
        "2022/09/01 00:20,010,8000EBD30,010,8000EBD30,3697.34,US Dollar,3697.34,US Dollar,"
        "Reinvestment,0\n"
        "2022/09/02 00:00,03208,8000F4580,001,8000F5340,0.01,US Dollar,0.01,US Dollar,"
        "Cheque,0\n"
        "2022/09/01 00:06,10,8000EBD30,03208,8000F4580,2848.96,Euro,3000.5,US Dollar,"
        "ACH,1\n"
        "2022/09/03 11:59,001,8000F5340,10,8000EBD30,2.5,Yen,0.02,Euro,Wire,0\n"
    )
    path = folder / "HI-Small_Trans.csv"
    path.write_text(header + rows, "utf-8")
    return [path]


def paysim(folder: Path) -> list[Path]:
    """Write 4 transactions."""
    path = folder / "PS_20174392719_1491204439457_log.csv"
    path.write_text(
        "step,type,amount,nameOrig,oldbalanceOrg,newbalanceOrig,nameDest,oldbalanceDest,"
        "newbalanceDest,isFraud,isFlaggedFraud\n"
        "1,PAYMENT,9839.64,C1231006815,170136.0,160296.36,M1979787155,0.0,0.0,0,0\n"
        "1,TRANSFER,181.0,C1305486145,181.0,0.0,C553264065,0.0,0.0,1,0\n"
        "2,CASH_OUT,181.0,C840083671,181.0,0.0,C38997010,21182.0,0.0,1,0\n"
        "743,TRANSFER,339682.13,C2013999242,339682.13,0.0,C1850423904,0.0,0.0,0,1\n",
        "utf-8",
    )
    return [path]


def dgraph_fin(folder: Path) -> list[Path]:
    """Write 6 users with 17 features, two of them in the background."""
    x = np.arange(6 * 17, dtype=np.float64).reshape(6, 17) / 3
    x[0, 0] = x[3, 16] = -1
    np.savez(
        folder / "dgraphfin.npz",
        x=x,
        y=np.array([0, 1, 2, 3, 0, 1]),
        edge_index=np.array([[0, 1], [1, 2], [3, 4], [5, 0]]),
        edge_type=np.array([1, 11, 2, 3]),
        edge_timestamp=np.array([1, 5, 9, 821]),
        train_mask=np.array([0, 1]),
        valid_mask=np.array([4]),
        test_mask=np.array([5]),
    )
    return [folder / "dgraphfin.npz"]


def neo4j(folder: Path) -> list[Path]:
    """Write 4 nodes, one with two labels, and 2 relationships."""
    return write(
        folder,
        nodes_csv='id:ID,name,:LABEL\na1,"h6, h7",Person\na2,Acme,Company\n'
        "a3,h5,Person;Client\na4,h3,Person\n",
        relationships_csv=":START_ID,:END_ID,:TYPE\na1,a2,WORKS_FOR\na3,a2,OWNS\n",
    )
