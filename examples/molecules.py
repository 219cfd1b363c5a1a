"""Real molecules for molecule_gnn.py: the wwPDB's Chemical Component Dictionary, from biotite.

The dictionary has 49,086 components (ligands, cofactors, sugars, modified residues) with the
coordinates of a deposited structure; 46,844 have all of those, and 6 to 240 atoms beside hydrogen.
Its columns take 700 MB when they are read as text, so this is a separate program, which writes the
requested molecules into a file of a megabyte.

    python examples/molecules.py molecules.npz --train 1000 --valid 200 --seed 0
"""

from __future__ import annotations

import argparse
import sys
from itertools import pairwise
from typing import Any

import numpy as np

ELEMENTS = ["C", "N", "O", "S", "P", "F", "CL", "BR", "I", "B", "SE"]  # 0 to 10; any other: 11
BOND = {"SING": 1, "DOUB": 2, "TRIP": 3}
FEWEST_ATOMS = 6


class Dictionary:
    """Columns of all components; atoms, and bonds, of one are rows that follow each other."""

    def __init__(self) -> None:
        try:
            from biotite.structure.info import get_ccd
        except ImportError as error:
            sys.exit(f"{error}\nNeeded: pip install biotite==1.6.0")
        atoms, bonds = get_ccd()["chem_comp_atom"], get_ccd()["chem_comp_bond"]
        self.atom_name = atoms["atom_id"].as_array(str)
        symbol = np.char.upper(atoms["type_symbol"].as_array(str))
        self.heavy = ~np.isin(symbol, ["H", "D"])
        self.element = np.full(len(symbol), len(ELEMENTS), np.int8)
        for number, name in enumerate(ELEMENTS):
            self.element[symbol == name] = number
        axes = [atoms[f"model_Cartn_{axis}"].as_array(np.float32, np.nan) for axis in "xyz"]
        self.position = np.stack(axes, axis=1)
        self.bond = [bonds[f"atom_id_{end}"].as_array(str) for end in (1, 2)]
        self.bond_order = bonds["value_order"].as_array(str)
        self.atoms = spans(atoms["comp_id"].as_array(str))
        self.bonds = spans(bonds["comp_id"].as_array(str))

    def complete(self) -> tuple[list[str], list[int]]:
        """Components with all coordinates, and their numbers of heavy atoms, by name."""
        heavy = np.append(0, np.cumsum(self.heavy))
        lost = np.append(0, np.cumsum(self.heavy & ~np.isfinite(self.position).all(axis=1)))
        names, sizes = [], []
        for name in sorted(self.atoms.keys() & self.bonds.keys()):
            rows = self.atoms[name]
            size = int(heavy[rows.stop] - heavy[rows.start])
            if size >= FEWEST_ATOMS and lost[rows.stop] == lost[rows.start]:
                names.append(name)
                sizes.append(size)
        return names, sizes

    def molecule(self, name: str) -> tuple[Any, Any, Any]:
        """Elements [n], positions in Angstrom [n, 3], and bonds [b, 3]: two atoms and the order."""
        rows, bonds = self.atoms[name], self.bonds[name]
        heavy = self.heavy[rows]
        index = {atom: i for i, atom in enumerate(self.atom_name[rows][heavy])}
        pairs = zip(*(end[bonds] for end in self.bond), self.bond_order[bonds], strict=True)
        bonded = [
            (index[a], index[b], BOND.get(order, 1))
            for a, b, order in pairs
            if a in index and b in index
        ]
        position = self.position[rows][heavy]
        return self.element[rows][heavy], position, np.array(bonded, np.int16).reshape(-1, 3)


def spans(names: Any) -> dict[str, slice]:
    """Of each name its rows, which follow each other."""
    cuts = np.flatnonzero(np.concatenate([[True], names[1:] != names[:-1], [True]])).tolist()
    return {str(names[i]): slice(i, j) for i, j in pairwise(cuts)}


def chosen(dictionary: Dictionary, train: int, valid: int, seed: int) -> list[str]:
    """Training molecules, then others to validate with. One of the former is the largest of all."""
    names, sizes = dictionary.complete()
    largest = names[int(np.argmax(sizes))]
    rng = np.random.default_rng(seed)
    drawn = [str(name) for name in rng.choice(names, train + valid, replace=False)]
    drawn = [name for name in drawn if name != largest][: train + valid - 1]
    drawn.insert(int(rng.integers(train)), largest)
    return drawn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("path")
    parser.add_argument("--train", type=int, default=1000)
    parser.add_argument("--valid", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    dictionary = Dictionary()
    names = chosen(dictionary, options.train, options.valid, options.seed)
    elements, positions, bonds = zip(*map(dictionary.molecule, names), strict=True)
    np.savez(
        options.path,
        name=np.array(names),
        atoms=np.array(list(map(len, elements))),
        element=np.concatenate(elements),
        position=np.concatenate(positions),
        bonds=np.array(list(map(len, bonds))),
        bond=np.concatenate(bonds),
    )


if __name__ == "__main__":
    main()
