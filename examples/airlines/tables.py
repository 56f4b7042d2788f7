"""Routes, airports and planes of each airline, and the split of its routes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

__all__ = ["CLASSES", "PARTS", "Airline", "read_airlines", "split_routes"]

CLASSES = ("own", "codeshare")
PARTS = ("train", "val", "test")
MIN_ROUTES = 500
"""Airlines with more routes are owners."""
FILES = {
    "routes": "airline airline_id source source_id target target_id codeshare stops "
    "equipment",
    "airports": "id name city country iata icao lat lon altitude utc dst tz type by",
    "planes": "name iata icao",
}
"""Columns of the files, which have no header."""
RULES = ("E", "A", "S", "O", "Z", "N")
"""Rules of daylight saving time; none of them: unknown."""
MAKERS = ("Boeing", "Airbus", "Embraer", "Canadair", "McDonnell", "De")
"""First words of planes' names; none of them: another maker, or unknown."""
EARTH = 6371.0
"""Radius in km."""


@dataclass(frozen=True, eq=False)
class Airline:
    """What one airline knows of its routes.

    The tables hold features only, scaled by constants that all airlines share; airports
    and planes are those of its routes.

    Parameters
    ----------
    code : str
        The airline's code.
    routes, airports, planes : DataFrame
        Features; the index of airports and planes is the code.
    label : ndarray of shape (n,), int64
        Index in ``CLASSES`` of each route.
    ends : ndarray of shape (2, n), int64
        Rows of the source and destination airport of each route.
    equipment : ndarray of shape (2, m), int64
        Route and plane of each kind of plane that flies a route.
    pair : list of str
        Both airports of each route, in the same order for both directions.
    """

    code: str
    routes: pd.DataFrame
    airports: pd.DataFrame
    planes: pd.DataFrame
    label: np.ndarray
    ends: np.ndarray
    equipment: np.ndarray
    pair: list[str]

    def flat(self) -> np.ndarray:
        """Return the columns of each route, of its two airports and of its planes.

        Of several planes it is the mean.
        """
        planes = np.zeros((len(self.routes), self.planes.shape[1]))
        route, plane = self.equipment
        np.add.at(planes, route, self.planes.to_numpy()[plane])
        count = np.bincount(route, minlength=len(self.routes)).clip(1)
        airports = self.airports.to_numpy()
        return np.hstack(
            [
                self.routes.to_numpy(),
                *(airports[end] for end in self.ends),
                planes / count[:, None],
            ]
        )


def read_file(folder: Path, name: str) -> pd.DataFrame:
    """Read one file; ``NA`` is a code of Namibia and no hole."""
    columns = FILES[name].split()
    return pd.read_csv(
        folder / f"{name}.dat.gz",
        header=None,
        names=columns,
        dtype={key: str for key in ("iata", "equipment") if key in columns},
        keep_default_na=False,
        na_values=["\\N"],
    )


def read_airlines(folder: Path) -> dict[str, Airline]:
    """Read the airlines with more than ``MIN_ROUTES`` routes, by code."""
    routes = read_file(folder, "routes")
    airports = read_file(folder, "airports").dropna(subset="iata").set_index("iata")
    planes = read_file(folder, "planes").drop_duplicates("iata").set_index("iata")
    size = routes["airline"].value_counts()
    return {
        str(code): _airline(
            str(code),
            routes[routes["airline"] == code].reset_index(drop=True),
            airports,
            planes,
        )
        for code in sorted(size.index[size > MIN_ROUTES])
    }


def _airline(
    code: str, routes: pd.DataFrame, airports: pd.DataFrame, planes: pd.DataFrame
) -> Airline:
    """Return one airline's tables."""
    ports = sorted({*routes["source"], *routes["target"]})
    known = airports.reindex(ports)
    place = {port: number for number, port in enumerate(ports)}
    ends = np.stack([routes[end].map(place).to_numpy() for end in ("source", "target")])
    flown = routes["equipment"].fillna("").str.split()
    types = sorted({one for each in flown for one in each})
    row = {one: number for number, one in enumerate(types)}
    pairs = [(r, row[one]) for r, each in enumerate(flown) for one in each]
    equipment = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    both = list(zip(routes["source"], routes["target"], strict=True))
    country = known["country"].to_numpy()
    features = pd.DataFrame(
        {
            "distance": _distance(known, ends) / 2000,
            "same_country": (country[ends[0]] == country[ends[1]]).astype(float),
            "kinds_of_planes": flown.str.len() / 2,
            "is_flown_back": _flown_back(both),
        }
    )
    return Airline(
        code,
        features,
        _airport_columns(known, np.bincount(ends.flatten(), minlength=len(ports))),
        _plane_columns(
            planes["name"].reindex(types),
            np.bincount(equipment[1], minlength=len(types)),
        ),
        (routes["codeshare"] == "Y").to_numpy().astype(np.int64),
        ends,
        equipment,
        ["-".join(sorted(one)) for one in both],
    )


def _flown_back(both: list[tuple[str, str]]) -> list[float]:
    """Return 1 for each route that the airline has in the other direction, too."""
    there = set(both)
    return [float((b, a) in there) for a, b in both]


def _distance(known: pd.DataFrame, ends: np.ndarray) -> np.ndarray:
    """Return great-circle distances in km; 0 where an airport is unknown."""
    one, other = (_sphere(known)[end] for end in ends)
    angle = np.arccos(np.clip((one * other).sum(axis=1), -1, 1))
    is_known = known["lat"].notna().to_numpy()[ends].all(axis=0)
    return EARTH * np.where(is_known, angle, 0.0)


def _sphere(known: pd.DataFrame) -> np.ndarray:
    """Return the place of each airport as a vector of length 1, or 0 if unknown."""
    lat, lon = (np.radians(known[key].to_numpy(float)) for key in ("lat", "lon"))
    found = np.stack(
        [np.cos(lat) * np.cos(lon), np.cos(lat) * np.sin(lon), np.sin(lat)]
    )
    return np.nan_to_num(found.T)


def _airport_columns(known: pd.DataFrame, routes: np.ndarray) -> pd.DataFrame:
    """Return the features of airports: place, altitude, time zone, number of routes."""
    x, y, z = _sphere(known).T
    columns = {
        "is_known": known["lat"].notna().astype(float),
        "x": x,
        "y": y,
        "z": z,
        "altitude": known["altitude"].fillna(0) / 2000,
        "utc": pd.to_numeric(known["utc"]).fillna(0) / 6,
        **{f"rule_{rule}": (known["dst"] == rule).astype(float) for rule in RULES},
        "log_routes": np.log1p(routes) / 3,
    }
    return pd.DataFrame(columns, index=known.index)


def _plane_columns(names: pd.Series, routes: np.ndarray) -> pd.DataFrame:
    """Return the features of planes: maker and number of routes."""
    maker = names.str.split().str[0]
    columns = {one: (maker == one).astype(float) for one in MAKERS}
    return pd.DataFrame(
        {**columns, "log_routes": np.log1p(routes) / 3}, index=names.index
    )


def split_routes(
    airlines: dict[str, Airline], draw: int
) -> dict[str, dict[str, np.ndarray]]:
    """Draw 60/20/20 percent of the pairs of airports; return masks by airline and part.

    Both directions of a pair are in one part, and at all airlines in the same one.
    """
    pairs = sorted({pair for one in airlines.values() for pair in one.pair})
    order = np.random.default_rng(draw).permutation(len(pairs))
    cuts = [round(0.6 * len(pairs)), round(0.8 * len(pairs))]
    part = np.empty(len(pairs), dtype=np.int64)
    for number, chosen in enumerate(np.split(order, cuts)):
        part[chosen] = number
    part_of = dict(zip(pairs, part.tolist(), strict=True))
    return {
        code: {
            name: np.array([part_of[pair] == number for pair in one.pair])
            for number, name in enumerate(PARTS)
        }
        for code, one in airlines.items()
    }
