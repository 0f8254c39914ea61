"""Draw pictures with questions, and write them as parquet with encoded PNG bytes.

    python examples/vision/make.py [--out DIR] [--train N] [--eval N]

Writes train.parquet and eval.parquet with N rows of each task (count, larger, digit); no picture is
in both. Drawing 6,000 takes a few seconds on one CPU core.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
import pictures
import pyarrow as arrow
import pyarrow.parquet as parquet

SEEDS = {"count": 1, "larger": 2, "digit": 3}
ROW_ORDER_SEED = 4
IMAGES = arrow.list_(arrow.struct([("bytes", arrow.binary()), ("path", arrow.string())]))
TEXTS = ("prompt", "answer", "data_source")


def write(file: Path, tables: list[arrow.Table]) -> None:
    """Write the rows of all tasks in a random order, the same one every time."""
    table = arrow.concat_tables(tables)
    order = np.random.default_rng(ROW_ORDER_SEED).permutation(table.num_rows)
    parquet.write_table(table.take(order), file, row_group_size=512)
    print(f"{file}: {table.num_rows} rows, {file.stat().st_size / 2**20:.1f} MiB")


def build(out: Path, train: int, evaluation: int) -> None:
    """Draw the pictures of each task at once, so that none is in both files, and write them."""
    out.mkdir(parents=True, exist_ok=True)
    schema = arrow.schema([*((name, arrow.string()) for name in TEXTS), ("images", IMAGES)])
    tables = [
        arrow.Table.from_pylist(list(pictures.rows(task, train + evaluation, seed)), schema)
        for task, seed in SEEDS.items()
    ]
    write(out / "eval.parquet", [table.slice(0, evaluation) for table in tables])
    write(out / "train.parquet", [table.slice(evaluation) for table in tables])


def main() -> int:
    """Parse the command line and build."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    here = Path(__file__).resolve().parent
    parser.add_argument("--out", type=Path, default=here / "data", help="default: data, beside it")
    parser.add_argument("--train", type=int, default=2000, help="rows of each task to train on")
    parser.add_argument("--eval", type=int, default=128, help="rows of each task to evaluate on")
    options = parser.parse_args()
    build(options.out, options.train, options.eval)
    return 0


if __name__ == "__main__":
    sys.exit(main())
