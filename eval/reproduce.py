"""The tables of RESULTS.md, each measured again by its command.

    python eval/reproduce.py --list
    python eval/reproduce.py fold-sizes-t5 recover-t5 --output results/again [--processes 2]
    python eval/reproduce.py lab --quick --output results/look

Each command runs in a process of its own with one thread, but for those of speed that ask for two.
Those that time models run one after another at the end, whatever `--processes` says. Tables,
figures and a log of each command go below `--output`, so that nothing is taken from the tables that
are committed. Models that a command is held against are trained first by their recipes, into
`results/NAME`, unless they are there. Names are tables, or else parts of their names: `t5` is all
of reference/t5. Minutes are rough, of one core without AMX, training left out.
Those of peers need `pip install tscompress[peers]`, those of fine-tuning `tscompress[finetuning]`,
`lab-modalities` and `lab-instruments` `tscompress[lab]`.
Tables that need a GPU run where one is asked for by its whole name. `--quick` is a look at whether
scripts run: few steps and small inputs, for the tables that have it, all of the lab among them.
What is drawn from other tables takes those below `--output`, and comes last. A command that fails
is shown with its exit status, keeps no other from its turn, and makes that of this script 1. A
verdict of the lab that is not as expected is a finding and no failure: the log's last line counts
them.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tscompress.errors import UsageError

ROOT = Path(__file__).resolve().parent.parent
#: Scripts whose tables have times, or that train for some minutes: nothing may run beside them.
TIMING = (
    "budgets.py", "by_design.py", "comparison.py", "exported.py", "exported_shapes.py", "family.py",
    "fold_growth.py", "methods.py", "peers.py", "recover.py", "shapes.py",
)  # fmt: skip


@dataclass(frozen=True)
class Table:
    """What is measured, by which script of this folder with which arguments.

    Attributes
    ----------
    name
        Of the files that come of it.
    arguments
        ``DIR`` in them is where these go.
    minutes
        Roughly, on one core.
    trained
        Recipes of ``recipes/pretrain`` whose models the arguments name.
    drawn_from
        Tables that it reads.
    needs_gpu
        It runs only if asked for by its whole name.
    has_quick
        Its script takes ``--quick``.
    """

    name: str
    arguments: str
    minutes: int
    trained: tuple[str, ...] = ()
    threads: int = 1
    drawn_from: tuple[str, ...] = ()
    needs_gpu: bool = False
    has_quick: bool = False

    def is_meant_by(self, name: str) -> bool:
        """Whether ``name`` is its name, or a part of it that will do."""
        return name == self.name or (name in self.name and not self.needs_gpu)

    @property
    def has_times(self) -> bool:
        return self.threads > 1 or self.arguments.startswith(TIMING)

    def command(self, directory: Path, *, quick: bool = False) -> list[str]:
        script, *rest = shlex.split(self.arguments)
        rest = [word.replace("DIR", str(directory)) for word in rest]
        look = ["--quick"] if quick else []
        return [sys.executable, str(ROOT / "eval" / script), *rest, *look]


def lab(name: str, arguments: str, minutes: int, *, needs_gpu: bool = False) -> Table:
    """A table of ``lab/``; models that its script trains go below ``DIR``, too."""
    command = f"lab/{arguments} --output DIR/lab-{name}"
    return Table(f"lab-{name}", command, minutes, needs_gpu=needs_gpu, has_quick=True)


TABLES = (
    Table(
        "fold-front-bolt",
        "fold.py sizes --model reference/bolt --size 64,0.5 --size 64,0.5,160 --size 64,0.5,128 "
        "--size 32,0.25,160 --size 32,0.25,112 --output DIR/fold-front",
        8,
    ),
    Table(
        "fold-sizes-t5",
        "fold.py sizes --model reference/t5 --max-series 100 --size 32,0.5 --size 32,0.5,208 "
        "--size 64,0.5,160 --size 64,0.5,128 --size 32,0.25 --size 32,0.25,160 --size 32,0.25,112 "
        "--size 32,0.25,96 --output DIR/fold-sizes",
        40,
    ),
    Table("fold-widths-bolt", "fold.py widths --model reference/bolt --output DIR/fold-widths", 14),
    Table(
        "fold-widths-t5",
        "fold.py widths --model reference/t5 --max-series 100 --output DIR/fold-widths",
        40,
    ),
    Table(
        "fold-switches-bolt",
        "fold.py switches --model reference/bolt --max-series 200 --output DIR/fold-switches",
        30,
    ),
    Table(
        "fold-switches-t5",
        "fold.py switches --model reference/t5 --max-series 100 --output DIR/fold-switches",
        60,
    ),
    Table(
        "fold-latent-t5",
        "fold.py latent --model reference/t5 --max-series 40 --output DIR/fold-latent",
        15,
    ),
    Table(
        "fold-front-chronos2",
        "fold.py sizes --model reference/chronos2 --size 64,0.5 --size 64,0.75,208 "
        "--size 64,0.5,160 --size 32,0.5,224 --size 64,0.5,128 --size 64,0.25,128 "
        "--size 64,0.25,96 --size 32,0.25,160 --size 64,0.25,64 --output DIR/fold-front",
        25,
    ),
    Table(
        "fold-frequencies-bolt",
        "fold.py sizes --suite offline-frequencies --model reference/bolt --size 64,0.5 "
        "--size 64,0.5,160 --size 64,0.5,128 --size 32,0.25,160 --size 32,0.25,112 "
        "--output DIR/fold-frequencies",
        6,
    ),
    Table(
        "fold-frequencies-chronos2",
        "fold.py sizes --suite offline-frequencies --model reference/chronos2 --size 64,0.5 "
        "--size 64,0.5,160 --size 64,0.5,128 --size 64,0.25,128 --size 64,0.25,96 "
        "--output DIR/fold-frequencies",
        10,
    ),
    Table(
        "fold-covariates-chronos2",
        "fold.py sizes --suite covariates --model reference/chronos2 --size 64,0.5 "
        "--size 64,0.5,160 --size 64,0.5,128 --size 64,0.25,128 --size 64,0.25,96 "
        "--output DIR/fold-covariates",
        10,
    ),
    Table(
        "fold-front-bolt-16384series",
        "fold.py sizes --model reference/bolt --calibration-series 16384 "
        "--size 64,0.5,160 --size 32,0.25,160 --size 32,0.25,112 --output DIR/fold-front",
        12,
    ),
    Table(
        "fold-frequencies-bolt-16384series",
        "fold.py sizes --suite offline-frequencies --model reference/bolt "
        "--calibration-series 16384 --size 64,0.5,160 --size 32,0.25,160 --size 32,0.25,112 "
        "--output DIR/fold-frequencies",
        9,
    ),
    Table(
        "fold-front-chronos2-16384series",
        "fold.py sizes --model reference/chronos2 --calibration-series 16384 "
        "--size 64,0.5,160 --size 64,0.5,128 --size 64,0.25,96 --output DIR/fold-front",
        16,
    ),
    Table(
        "fold-frequencies-chronos2-16384series",
        "fold.py sizes --suite offline-frequencies --model reference/chronos2 "
        "--calibration-series 16384 --size 64,0.5,160 --size 64,0.5,128 --size 64,0.25,96 "
        "--output DIR/fold-frequencies",
        12,
    ),
    Table(
        "fold-widths-chronos2",
        "fold.py widths --model reference/chronos2 --output DIR/fold-widths",
        15,
    ),
    Table(
        "fold-attention-chronos2",
        "fold.py attention --model reference/chronos2 --ratio 0.25 --max-series 200 "
        "--output DIR/fold-attention",
        20,
    ),
    Table(
        "fold-switches-chronos2",
        "fold.py switches --model reference/chronos2 --max-series 200 --output DIR/fold-switches",
        30,
    ),
    Table(
        "peers-bolt",
        "peers.py --model reference/bolt --max-series 200 --smaller reference/bolt-nano "
        "--output DIR/peers",
        30,
    ),
    Table(
        "peers-t5",
        "peers.py --model reference/t5 --max-series 100 --smaller reference/t5-nano "
        "--output DIR/peers",
        200,
    ),
    Table(
        "peers-chronos2",
        "peers.py --model reference/chronos2 --max-series 200 --output DIR/peers",
        25,
    ),
    Table("methods-bolt", "methods.py --model reference/bolt --output DIR/methods", 25),
    Table(
        "methods-t5",
        "methods.py --model reference/t5 --max-series 100 --method fold --method svd "
        "--method activation-svd --output DIR/methods",
        65,
    ),
    Table(
        "family-t5",
        "family.py --larger reference/t5 --smaller reference/t5-nano --max-series 100 "
        "--output DIR/family-t5",
        30,
    ),
    Table(
        "table2-t5", "table2.py --model reference/t5 --max-series 100 --output DIR/table2-t5", 20
    ),
    Table(
        "budgets-bolt",
        "budgets.py --model reference/bolt --budget parameters=0.6 --budget parameters=0.4 "
        "--budget parameters=0.25 --budget macs=0.3 --output DIR/budgets "
        "--models DIR/budgets-models",
        40,
    ),
    Table(
        "budgets-t5",
        "budgets.py --model reference/t5 --max-series 100 --budget parameters=0.7 "
        "--budget parameters=0.5 --budget parameters=0.35 --budget parameters=0.25 --arm uniform "
        "--arm 'by layer' --arm 'by layer, whole width' --output DIR/budgets "
        "--models DIR/budgets-models",
        100,
    ),
    Table(
        "budgets-chronos2",
        "budgets.py --model reference/chronos2 --budget parameters=0.7 --budget parameters=0.6 "
        "--budget parameters=0.4 --budget parameters=0.25 --output DIR/budgets "
        "--models DIR/budgets-models",
        60,
    ),
    Table("shapes", "shapes.py --threads 2 --output DIR/shapes", 10, threads=2, has_quick=True),
    Table(
        "shapes-chronos2",
        "shapes.py --threads 2 --models chronos-2-base --repeats 5 --memory "
        "--output DIR/shapes-chronos2",
        8,
        threads=2,
        has_quick=True,
    ),
    Table(
        "shapes-gpu",
        "shapes.py --device cuda --models chronos-2-base chronos-bolt-base chronos-t5-base "
        "--output DIR/shapes-gpu",
        2,
        threads=2,
        needs_gpu=True,
        has_quick=True,
    ),
    Table("fold-growth", "fold_growth.py --output DIR/fold-growth", 25, threads=2),
    Table(
        "recover-bolt",
        "recover.py --model reference/bolt --trial 32,0.25,600steps,d_model=96 "
        "--output DIR/recover",
        30,
    ),
    Table(
        "recover-narrower-bolt",
        "recover.py --model reference/bolt --trial parameters=0.23,1200steps,d_model=160 "
        "--trial parameters=0.15,600steps,d_model=128 --output DIR/recover-narrower",
        75,
    ),
    Table(
        "recover-chronos2",
        "recover.py --model reference/chronos2 --trial 64,0.25,10,d_model=128 "
        "--trial 64,0.25,10,d_model=64 --trial parameters=0.3,10 --output DIR/recover",
        125,
    ),
    Table(
        "recover-t5",
        "recover.py --model reference/t5 --max-series 100 --trial 32,0.25,10,d_model=160 "
        "--seed 0 --output DIR/recover",
        18,
    ),
    Table(
        "recover-narrower-t5",
        "recover.py --model reference/t5 --max-series 100 --num-series 32 "
        "--trial parameters=0.3,300steps,d_model=192 --trial parameters=0.15,800steps,d_model=128 "
        "--output DIR/recover-narrower",
        130,
    ),
    Table(
        "comparison-bolt",
        "comparison.py --model reference/bolt --smaller reference/bolt-nano --max-series 200 "
        "--seed 0 --output DIR/comparison",
        90,
    ),
    Table(
        "comparison-t5",
        "comparison.py --model reference/t5 --max-series 100 --smaller reference/t5-nano "
        "--seed 0 --output DIR/comparison",
        95,
    ),
    Table(
        "by-design-t5",
        "by_design.py --recipe recipes/pretrain/by-design-t5.yaml --reuse reference/t5 "
        "--schedule 3,0.27 --schedule 5,0.35 --schedule 7,0.40 --size 64,0.5 --max-series 100 "
        "--models DIR/by-design-t5-models --output DIR/by-design-t5",
        60,
        needs_gpu=True,
    ),
    Table(
        "by-design-bolt",
        "by_design.py --recipe recipes/pretrain/by-design-bolt.yaml --schedule 2,0.25 "
        "--schedule 3,0.50 --schedule 5,0.70 --size 64,0.5 --models DIR/by-design-bolt-models "
        "--output DIR/by-design-bolt",
        15,
        needs_gpu=True,
    ),
    Table(
        "calibration-bolt",
        "calibration.py --model reference/bolt --rank 16 --ff-ratio 0.5 --output DIR/calibration",
        15,
    ),
    Table(
        "compressibility-bolt",
        "compressibility.py --run results/bolt-nano --max-series 100 "
        "--output DIR/compressibility-bolt",
        25,
        ("bolt-nano",),
    ),
    Table("finetune-bolt", "finetune.py --model reference/bolt --output DIR/finetune", 3),
    Table("finetune-t5", "finetune.py --model reference/t5 --output DIR/finetune", 25),
    Table(
        "finetune-chronos2",
        "finetune.py --model reference/chronos2 --output DIR/finetune",
        10,
    ),
    lab("theory", "theory.py", 2),
    lab("chebyshev", "chebyshev.py --runs DIR/lab-models", 8),
    lab("heads", "heads.py --runs DIR/lab-models", 8),
    lab("watch", "watch.py --runs DIR/lab-models", 4),
    lab("trainings", "trainings.py --runs DIR/lab-models", 16),
    lab("cut-advice", "cut_advice.py", 1),
    Table(
        "exported-bolt",
        "exported.py --model reference/bolt --max-series 50 --output DIR/exported",
        20,
    ),
    Table(
        "exported-chronos2",
        "exported.py --model reference/chronos2 --max-series 50 --output DIR/exported",
        20,
    ),
    Table(
        "exported-t5",
        "exported.py --model reference/t5 --max-series 20 --output DIR/exported",
        20,
    ),
    Table(
        "exported-shapes",
        "exported_shapes.py --output DIR/exported-shapes",
        150,
        has_quick=True,
    ),
    Table("series-files", "series_files.py --output DIR/series-files", 3),
    lab("modalities", "modalities.py", 4),
    lab("covariates", "covariates.py --models DIR/lab-covariates-models", 60),
    lab("instruments", "instruments.py --models DIR/lab-instruments-models", 15),
    lab(
        "instruments-gpu",
        "instruments.py --recipe recipes/lab/instruments-gpu.yaml --device cuda "
        "--only training trained labour --models DIR/lab-instruments-gpu-models",
        10,
        needs_gpu=True,
    ),
    lab("bridge", "bridge.py --models DIR/lab-models", 20),
    lab(
        "under-compression",
        "under_compression.py --models DIR/lab-under-compression-models",
        30,
    ),
    Table(
        "front-bolt",
        "front.py --tables DIR --model reference/bolt --output DIR/front",
        1,
        drawn_from=("comparison-bolt",),
    ),
)


def chosen(names: Sequence[str], *, quick: bool = False) -> list[Table]:
    """Tables of these names, or parts of names, in the order of the list; of none, all that need
    no GPU. ``quick``: of these, those that have a quick run.

    Raises
    ------
    UsageError
        No table has such a name, or none of those that are meant has a quick run.
    """
    for name in names:
        if not any(table.is_meant_by(name) for table in TABLES):
            raise UsageError(f"no table is called {name!r}; --list shows those there are.")
    meant = [table for table in TABLES if not names and not table.needs_gpu]
    whole = {table.name for table in TABLES} & set(names)
    parts = [name for name in names if name not in whole]
    meant += [t for t in TABLES if t.name in whole or any(map(t.is_meant_by, parts))]
    if quick and not any(table.has_quick for table in meant):
        having = ", ".join(table.name for table in TABLES if table.has_quick)
        raise UsageError(
            f"no table that is meant has a quick run; leave --quick out, or: {having}."
        )
    return [table for table in meant if table.has_quick or not quick]


def without_quick(names: Sequence[str], tables: Sequence[Table]) -> str:
    """A line on the tables meant by ``names`` that --quick leaves out, if there are any."""
    left = [table.name for table in chosen(names) if names and table not in tables]
    return f"left out, they have no quick run: {', '.join(left)}" if left else ""


def training(recipe: str) -> list[str]:
    """The command that trains a model that tables are held against, or resumes that."""
    path, output = ROOT / "recipes" / "pretrain" / f"{recipe}.yaml", ROOT / "results" / recipe
    # Stopped before its first checkpoint it left a log, which --force writes over.
    resume = ["--resume"] if (output / "checkpoint").is_dir() else ["--force"]
    program = [sys.executable, "-m", "tscompress", "pretrain"]
    return [*program, str(path), "--output", str(output), *resume]


def described(table: Table, directory: Path, *, quick: bool = False) -> str:
    """Name, minutes and command, as ``--list`` shows them."""
    line = shlex.join(["python", *table.command(directory, quick=quick)[1:]])
    minutes = "" if quick else f" ({table.minutes} min{' on a GPU' if table.needs_gpu else ''})"
    return f"{table.name}{minutes}: {line}"


def run(name: str, command: Sequence[str], threads: int, directory: Path) -> bool:
    """Whether it ended well; what it says goes to a log."""
    started = time.monotonic()
    log = directory / f"{name}.log"
    print(f"{name}: started, {log}", flush=True)
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    with log.open("w") as file:
        status = subprocess.run(
            command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, env=environment, check=False
        ).returncode
    minutes = f"{(time.monotonic() - started) / 60:.1f} min"
    print(f"{name}: {f'exit status {status}' if status else 'done'}, {minutes}", flush=True)
    return status == 0


def measure(table: Table, directory: Path, *, quick: bool = False) -> bool:
    """Whether the command of a table ended well."""
    return run(table.name, table.command(directory, quick=quick), table.threads, directory)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="tables, or parts of their names; default: all")
    parser.add_argument("--list", action="store_true", help="show tables and commands, run none")
    parser.add_argument(
        "--output", type=Path, help="a directory; default: results/again, of --quick results/look"
    )
    parser.add_argument("--quick", action="store_true", help="do they run? of tables that have it")
    parser.add_argument("--processes", type=int, default=1, help="commands at a time")
    arguments = parser.parse_args()
    try:
        tables = chosen(arguments.names, quick=arguments.quick)
    except UsageError as error:
        parser.error(str(error))
    output = arguments.output or Path("results/look" if arguments.quick else "results/again")
    if arguments.list:
        meant = tables if arguments.names or arguments.quick else TABLES
        print("\n".join(described(table, output, quick=arguments.quick) for table in meant))
        return
    directory = output.absolute()
    directory.mkdir(parents=True, exist_ok=True)
    if arguments.quick and (line := without_quick(arguments.names, tables)):
        print(line)
    recipes = dict.fromkeys(recipe for table in tables for recipe in table.trained)
    missing = [one for one in recipes if not (ROOT / "results" / one / "model").is_dir()]
    together = [table for table in tables if not table.has_times and not table.drawn_from]
    alone = [table for table in tables if table.has_times and not table.drawn_from]
    drawn = [table for table in tables if table.drawn_from]
    with ThreadPoolExecutor(max(1, arguments.processes)) as pool:
        done = list(pool.map(lambda one: run(one, training(one), 1, directory), missing))
        done += pool.map(lambda one: measure(one, directory, quick=arguments.quick), together)
    done += [measure(one, directory, quick=arguments.quick) for one in [*alone, *drawn]]
    if not all(done):
        sys.exit(1)


if __name__ == "__main__":
    main()
