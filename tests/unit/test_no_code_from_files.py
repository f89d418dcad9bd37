"""Nothing that is read from a file is run: the calls that would do so appear nowhere."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("edge_spec", "exporters", "runtimes", "apps")
MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "yaml"}
BUILTINS = {"eval", "exec", "compile", "__import__"}
ATTRIBUTES = {
    *("torch.load", "os.system", "os.popen", "yaml.load", "numpy.load", "np.load"),
    "importlib.import_module",
}
# What is allowed, with the reason.
ALLOWED = {
    # Files of scores that the exporter itself has just written; numpy refuses pickles by default.
    ("exporters/coreai/export.py", "np.load"),
    ("exporters/optimum.py", "np.load"),
    # Unfinished trainings and kept answers, which numpy reads without pickles by default.
    ("edge_spec/distill/features.py", "np.load"),
}
# A keyword and the only value that it may have.
KEYWORDS = {"allow_pickle": False, "trust_remote_code": False, "weights_only": True, "shell": False}


def found(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in MODULES:
            yield node.module or ""
        elif isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id in BUILTINS:
                yield node.func.id
            if isinstance(node.func, ast.Attribute) and ast.unparse(node.func) in ATTRIBUTES:
                yield ast.unparse(node.func)
            for keyword in node.keywords:
                if keyword.arg in KEYWORDS:
                    value = keyword.value
                    allowed = KEYWORDS[keyword.arg]
                    if not isinstance(value, ast.Constant) or value.value is not allowed:
                        yield f"{keyword.arg}={ast.unparse(value)}"


def test_no_module_runs_what_it_reads() -> None:
    calls = {
        (path.relative_to(ROOT).as_posix(), name)
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
        for name in found(path.read_text(encoding="utf-8"))
    }
    assert calls == ALLOWED


def test_such_a_call_would_be_found() -> None:
    for source, name in (
        ("import pickle", "pickle"),
        ("from yaml import load", "yaml"),
        ("def f():\n    return eval('1')", "eval"),
        ("torch.load(path)", "torch.load"),
        ("np.load(path, allow_pickle=True)", "allow_pickle=True"),
        ("open_model(path, trust_remote_code=chosen)", "trust_remote_code=chosen"),
    ):
        assert name in set(found(source)), source
    assert set(found("re.compile('a'); model.eval(); f(trust_remote_code=False)")) == set()
