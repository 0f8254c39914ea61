"""Scripts are parsed, never executed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from async_opd.config.yaml_text import YamlError
from async_opd.tools.importing.draft import Budget, Expression
from async_opd.tools.importing.frameworks import read_yaml
from async_opd.tools.importing.python_script import read_python
from async_opd.tools.importing.shell import flags, overrides, read_shell


def words(text: str) -> list[str]:
    (found,) = read_shell(text, Budget()).commands
    return found


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a=1\nrun x=$a y=${a}b z=\"$a c\"", ["run", "x=1", "y=1b", "z=1 c"]),
        ("run x=${A:-7} y=${B:=8} z=${C-9}", ["run", "x=7", "y=8", "z=9"]),
        ("a=3\nrun x=${A:-${a}}", ["run", "x=3"]),
        ("run a=1 \\\n    b=2 \\\n    c=3", ["run", "a=1", "b=2", "c=3"]),
        ("A=(\n  x=1  # why\n  y='a # b'\n)\nrun \"${A[@]}\"", ["run", "x=1", "y=a # b"]),
        ("A=(x=1)\nA+=(y=2)\nrun \"${A[@]}\"", ["run", "x=1", "y=2"]),
        ("a=2\nrun x=$((a * (3 + 4) + 1)) y=$(( $a-5 ))", ["run", "x=15", "y=-3"]),
        ("export a=1\nrun $a", ["run", "1"]),
        ("run $HOME/data \"$@\" ${@:2} $*", ["run", "${HOME}/data"]),
        ("a=${a}b\nrun $a", ["run", "${a}b"]),
        ("a='--b 1'\na+=\" --c 2\"\nrun $a x$a \"${a}\"",
         ["run", "--b", "1", "--c", "2", "x--b 1 --c 2", "--b 1 --c 2"]),
        ("a=\nrun x $a ${b:-}", ["run", "x"]),
        ("export a=1 b='2 3'\nc=4 d=5\nrun $a \"$b\" $c $d", ["run", "1", "2 3", "4", "5"]),
        ("run \"a\\\"b # c\" \\\n 'd' # e", ["run", 'a"b # c', "d"]),
    ],
)  # fmt: skip
def test_variables_arrays_and_sums_of_a_script_are_followed(text: str, expected: list[str]) -> None:
    assert words(text) == expected


def test_a_condition_is_named_and_variables_that_it_sets_are_not_known_from_then_on() -> None:
    script = read_shell(
        "a=1\nif [ $b ]; then\n  a=2\nfi\nfor x in 1; do run y; done\nrun $a\n", Budget()
    )
    assert script.commands == [["run", "$(a is set in a condition or loop)"]]
    assert script.skipped == ["if [ $b ]; then", "for x in 1; do run y; done"]


@pytest.mark.parametrize(
    "block",
    [
        'if x; then\n  a "${A[@]}"\n  echo "done" fi }\n  run no\nfi',
        "for x in 1; do\n  if y; then z; fi\n  run no\ndone",
        "die() { echo x; exit 1; }",
        "function die {\n  run no\n}",
        "die()\n{\n  run no\n}",
        "[ x ] || {\n  run no\n}",
        "cat x | while read y; do\n  run no\ndone < z",
    ],
)
def test_a_block_ends_where_its_last_word_is_a_command(block: str) -> None:
    script = read_shell(f"{block}\nrun a.b=1", Budget())
    assert script.commands == [["run", "a.b=1"]]
    assert [one.removesuffix(" {") for one in script.skipped] == [
        block.splitlines()[0].removesuffix(" {")
    ]


def test_commands_in_braces_are_read() -> None:
    commands = read_shell("{\n  a=1\n  run $a\n} | tee log", Budget()).commands
    assert ["run", "1"] in commands


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ('run "$@"', "$@"),
        ("[ x ] && A+=(b)", "[ x ] && A+=(b)"),
        ("run a.b=1 $MORE", "${MORE}"),
        ("run a.b=1 ${X:+c.d=2}", "${X:+c.d=2}"),
        ("for x in 1; do a=c.d=2; done\nrun a.b=1 $a", "$(a is set in a condition or loop)"),
    ],
)
def test_words_that_may_set_any_key_are_named(line: str, named: str) -> None:
    assert read_shell(line, Budget()).skipped[-1] == named


def test_no_command_of_a_script_runs(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    read_shell(
        f"touch {marker}\nx=$(touch {marker})\ny=`touch {marker}`\nz=$(( $(touch {marker}) ))",
        Budget(),
    )
    read_python(f"open({str(marker)!r}, 'w')\nGKDConfig(beta=open({str(marker)!r}, 'w'))", Budget())
    assert not marker.exists()


def test_overrides_are_values_with_plus_signs_and_quotes() -> None:
    found = overrides(
        ["+a.b=1", "++a.c='x'", "a.d=['p', 'q']", "a.e=1e-6", "a.f=null", "a.g=False"], Budget()
    )
    assert found == {
        "a.b": 1,
        "a.c": "x",
        "a.d": ["p", "q"],
        "a.e": 1e-6,
        "a.f": None,
        "a.g": False,
    }


def test_flags_have_a_value_or_are_true() -> None:
    given = ["x.py", "--learning_rate", "2e-5", "--use_peft", "--lora-r=8", "--beta", "-1"]
    assert flags(given, Budget()) == {
        "learning_rate": 2e-5,
        "use_peft": True,
        "lora_r": 8,
        "beta": -1,
    }


def test_a_flag_may_have_several_values_and_what_the_shell_reads_is_none() -> None:
    given = ["trl", "gold", "--lora_target_modules", "q_proj", "k_proj", "--use_peft", "2>&1", "|"]
    assert flags([*given, "tee", "log"], Budget()) == {
        "lora_target_modules": ["q_proj", "k_proj"],
        "use_peft": True,
    }


def test_several_values_of_which_one_is_not_known_are_not_known() -> None:
    found = flags(["gold.py", "--beta", "1", "$(nproc)"], Budget())
    assert found == {"beta": Expression("1 $(nproc)")}


def test_overrides_of_whole_sections_are_those_of_their_keys_and_removed_keys_are_named() -> None:
    assert overrides(["+a.b={c:1,d:{e:x}}", "~a.f", "a.g={}"], Budget()) == {
        "a.b.c": 1,
        "a.b.d.e": "x",
        "~a.f": None,
        "a.g": {},
    }


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *(
            pytest.param(text, {"learning_rate": Expression("lr")}, id=f"a second value {number}")
            for number, text in enumerate(
                (
                    "lr = 1e-5\nif big:\n    lr = 1e-6\nGKDConfig(learning_rate=lr)",
                    "lr = 1e-5\nlr *= 2\nGKDConfig(learning_rate=lr)",
                    "lr = 1e-5\nfor lr in rates:\n    GKDConfig(learning_rate=lr)",
                    "lr = 1e-5\ndef train(lr):\n    GKDConfig(learning_rate=lr)",
                    "lr = lr\nGKDConfig(learning_rate=lr)",
                )
            )
        ),
        pytest.param(
            "GKDConfig(beta=0.1, seed=3)\nGKDConfig(beta=0.9, seed=3)",
            {"beta": Expression("0.1 or 0.9"), "seed": 3},
            id="two calls",
        ),
        pytest.param(
            "rest = {'beta': 0.5}\nGKDConfig(**rest, **others())",
            {"beta": 0.5, "**others()": Expression("others()")},
            id="arguments that are passed on",
        ),
        pytest.param(
            "model = model\nGKDTrainer(model, 'teacher')",
            {"model_name_or_path": Expression("model"), "teacher_model_name_or_path": "teacher"},
            id="models by position",
        ),
        pytest.param(
            "load_dataset('a', split='train')\nload_dataset('b', split='test')",
            {
                "dataset_name": "a",
                "dataset_train_split": "train",
                "eval_dataset": Expression("load_dataset('b', split='test')"),
            },
            id="a data set to evaluate on",
        ),
        pytest.param(
            "load_dataset('a')\nload_dataset('b')",
            {"dataset_name": "a", "load_dataset": Expression("load_dataset('b')")},
            id="a second data set",
        ),
        pytest.param(
            "t = A.from_pretrained('big')\nt = t.eval().to('cuda')\nt.requires_grad_(False)\n"
            "GKDTrainer('small', t.half())",
            {"model_name_or_path": "small", "teacher_model_name_or_path": "big"},
            id="a model that is moved",
        ),
        pytest.param(
            "if packed:\n    t = A.from_pretrained('big', bits=4)\nelse:\n"
            "    t = A.from_pretrained('big')\nGKDTrainer('small', t)",
            {"teacher_model_name_or_path": "big"},
            id="a model that is loaded in two ways",
        ),
        pytest.param(
            "if large:\n    t = A.from_pretrained('big')\nelse:\n"
            "    t = A.from_pretrained('bigger')\nGKDTrainer('small', t)",
            {"teacher_model_name_or_path": Expression("t")},
            id="one of two models",
        ),
        pytest.param(
            "p.add_argument('--lr', type=float, default=1e-5)\n"
            "p.add_argument('-t', '--teacher-model')\n"
            "p.add_argument('--name', required=True)\np.add_argument('--kd', action='store_true')\n"
            "args = p.parse_args()\nlr = args.lr\n"
            "GKDConfig(learning_rate=lr, teacher_model=args.teacher_model, run_name=args.name, "
            "seq_kd=args.kd)",
            {
                "learning_rate": 1e-5,
                "teacher_model": None,
                "run_name": Expression("args.name"),
                "seq_kd": False,
            },
            id="defaults of arguments",
        ),
        pytest.param(
            "p.add_argument('--lr', default=1e-5)\nargs = p.parse_args()\nargs.lr = args.lr * 2\n"
            "GKDConfig(learning_rate=args.lr)",
            {"learning_rate": Expression("args.lr")},
            id="an argument that is changed",
        ),
        pytest.param(
            "@dataclass\nclass Settings:\n    lr: float = field(default=1e-5)\n"
            "    beta: float = 0.1\n"
            "    name: str = field(metadata={})\n(s,) = HfArgumentParser(Settings).parse()\n"
            "GKDConfig(learning_rate=s.lr, beta=s.beta, run_name=s.name)",
            {"learning_rate": 1e-5, "beta": 0.1, "run_name": Expression("s.name")},
            id="defaults of a dataclass",
        ),
        pytest.param(
            "c = GKDConfig(beta=0.5)\nc.lmbda = 1.0\nc.beta = 0.1",
            {"lmbda": 1.0, "beta": Expression("0.5 or 0.1")},
            id="attributes that are set later",
        ),
        *(
            pytest.param(text, {"**kw": Expression("kw")}, id=f"a changed dictionary {number}")
            for number, text in enumerate(
                (
                    "kw = {}\nkw['beta'] = 1\nGKDConfig(**kw)",
                    "kw = {'a': {}}\nkw['a']['b'] = 1\nGKDConfig(**kw)",
                    "kw = {'beta': 1}\ndel kw['beta']\nGKDConfig(**kw)",
                    "kw = {}\nkw.update(beta=1)\nGKDConfig(**kw)",
                )
            )
        ),
        pytest.param(
            "c = GKDConfig(beta=0.5)\nc.beta *= 2\nc.seed, d = 1, 2\nsetattr(c, 'lmbda', 1)\n"
            "setattr(c, name, 1)",
            {
                "beta": Expression("0.5 or c.beta"),
                "seed": Expression("c.seed"),
                "lmbda": Expression("setattr(c, 'lmbda', 1)"),
                "**setattr(c, name, 1)": Expression("setattr(c, name, 1)"),
            },
            id="attributes that are changed",
        ),
        pytest.param(
            "GKDTrainer('s', 't', args=GKDConfig())\nGOLDTrainer('s', 'u', args=GOLDConfig())",
            {
                "model_name_or_path": "s",
                "teacher_model_name_or_path": Expression("'t' or 'u'"),
                "config_class": Expression(
                    "'GKDConfig' or 'GOLDConfig' or 'GKDConfig' or 'GOLDConfig'"
                ),
            },
            id="two trainers",
        ),
        pytest.param(
            "name = 'student'\nmodel = AutoModelForCausalLM.from_pretrained(name)\n"
            "args = GKDConfig(beta=0.5, seed=compute(3), lmbda=lmbda)\n"
            "GKDTrainer(model=model, teacher_model='teacher', args=args)\n",
            {
                "config_class": "GKDConfig",
                "model_name_or_path": "student",
                "teacher_model_name_or_path": "teacher",
                "beta": 0.5,
                "seed": Expression("compute(3)"),
                "lmbda": Expression("lmbda"),
            },
            id="names that are followed",
        ),
    ],
)
def test_literals_of_a_script_are_read_and_the_rest_is_named(
    text: str, expected: dict[str, Any]
) -> None:
    assert read_python(text, Budget())[0].items() >= expected.items()


def test_parents_of_a_yaml_file_are_merged_and_references_resolved(tmp_path: Path) -> None:
    (tmp_path / "parent.yaml").write_text(
        "a: {b: 1, c: '${.b}', d: '${..e}'}\ne: 5\nf: '${mul:${a.b}, 4}'"
    )
    (tmp_path / "child.yaml").write_text("defaults: parent.yaml\na: {b: 2}\ng: x-${a.b}")
    found, parents, missing = read_yaml(tmp_path / "child.yaml", Budget())
    assert found == {"a.b": 2, "a.c": 2, "a.d": 5, "e": 5, "f": 8, "g": "x-2"}
    assert (parents, missing) == (["parent.yaml"], [])


def test_a_parent_that_is_not_there_is_named(tmp_path: Path) -> None:
    (tmp_path / "child.yaml").write_text("defaults: ../none.yaml\na: 1")
    assert read_yaml(tmp_path / "child.yaml", Budget()) == ({"a": 1}, [], ["../none.yaml"])


def test_references_whose_text_doubles_with_each_line_are_refused_and_take_no_memory(
    tmp_path: Path,
) -> None:
    lines = ["k0: abcdefgh", *(f"k{n + 1}: ${{k{n}}}${{k{n}}}" for n in range(60))]
    (tmp_path / "grows.yaml").write_text("\n".join(lines))
    with pytest.raises(SyntaxError, match=r"more than 4,194,304 characters, at 'k\d\d'"):
        read_yaml(tmp_path / "grows.yaml", Budget())


@pytest.mark.parametrize("text", ["a: x${a}", "a: ${a}", "a: {b: '${..c}'}\nc: ${a.b}"])
def test_a_value_that_refers_to_itself_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "self.yaml").write_text(text)
    with pytest.raises(YamlError, match="refers to itself"):
        read_yaml(tmp_path / "self.yaml", Budget())


def test_references_to_references_are_followed_however_many_there_are(tmp_path: Path) -> None:
    lines = ["k0: 7", *(f"k{n + 1}: ${{k{n}}}" for n in range(30))]
    (tmp_path / "long.yaml").write_text("\n".join(lines))
    assert read_yaml(tmp_path / "long.yaml", Budget())[0]["k30"] == 7


def test_a_scripts_variables_that_double_with_each_line_are_refused() -> None:
    lines = ["a=abcdefgh", *(["a=$a$a"] * 60), "run x=$a"]
    with pytest.raises(SyntaxError, match="4,194,304 characters"):
        read_shell("\n".join(lines), Budget())
    with pytest.raises(SyntaxError, match="4,194,304 characters"):
        read_shell("\n".join(["A=(abcdefgh)", *(['A+=("${A[@]}")'] * 60)]), Budget())


def test_a_variable_has_the_value_that_it_had_when_its_line_was_run() -> None:
    assert words("a=$b\nb=5\nrun $a") == ["run", "${b}"]
    assert words("a='$b'\nb=5\nrun $b") == ["run", "5"]


@pytest.mark.parametrize(
    "text",
    [
        "if x; then\n  n=5\nfi\nrun a.b=$n",
        "n=$(nproc)\nrun a.b=$n",
        "run a.b=$1",
        "run a.b=`nproc`",
        "run a.b=$((n * 2))",
        *(
            f"M=x\nrun a.b={one}"
            for one in ("${M##*/}", "${M%/}", "${M[0]}", "${M:+x}", "${M:?x y}")
        ),
        "n=5\n[ x ] && n=6\nrun a.b=$n",
        "n=5\nn=6; m=7\nrun a.b=$n",
        "n=5\nexport n=$(f $(g $(h)))\nrun a.b=$n",
    ],
)
def test_a_value_that_only_running_the_script_would_give_is_an_expression(text: str) -> None:
    found = overrides(read_shell(text, Budget()).commands[-1], Budget())
    assert isinstance(found["a.b"], Expression)


def test_a_default_that_is_assigned_is_the_variables_value_from_then_on() -> None:
    assert read_shell(': "${a:=7}"\nrun $a', Budget()).commands[-1] == ["run", "7"]


def test_flags_of_a_launcher_end_at_the_script() -> None:
    given = ["launch", "--steps", "2", "train.py", "--beta", "0"]
    assert flags(given, Budget()) == {"steps": 2, "beta": 0}
