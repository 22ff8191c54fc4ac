"""Print the docstrings, signatures and comments of some source files, without their code.

Read the output alone and write down what each file does; then open the code and compare. Where
the two differ, the text is at fault:

    python tests/reading.py --seed 1 --count 20
"""

import argparse
import ast
import io
import random
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

Line = tuple[int, str]
Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def signature(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """Return the line that declares a class or a function, without its body."""
    if isinstance(node, ast.ClassDef):
        bases = ", ".join(ast.unparse(base) for base in [*node.bases, *node.keywords])
        return f"class {node.name}({bases})"
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"def {node.name}({ast.unparse(node.args)}){returns}"


def declarations(node: Documented, indent: str = "") -> Iterator[Line]:
    """Yield the docstrings, signatures and fields in ``node``, each with its line number."""
    docstring = ast.get_docstring(node)
    if docstring is not None:
        shown = docstring.replace("\n", "\n" + " " * 6 + indent)
        yield node.body[0].lineno, f'{indent}"""{shown}"""'
    fields = isinstance(node, ast.ClassDef)
    todo = list(ast.iter_child_nodes(node))
    for child in todo:
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield child.lineno, indent + signature(child)
            yield from declarations(child, indent + "    ")
            continue
        if fields and isinstance(child, ast.AnnAssign):
            yield (
                child.lineno,
                f"{indent}{ast.unparse(child.target)}: {ast.unparse(child.annotation)}",
            )
        todo.extend(ast.iter_child_nodes(child))


def comments(source: str) -> Iterator[Line]:
    """Yield the comments of a file, each with its line number and its own indentation."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], " " * token.start[1] + token.string


def reading(source: str) -> str:
    """Return a file's docstrings, signatures and comments, in the order of its lines."""
    lines = {*declarations(ast.parse(source)), *comments(source)}
    return "\n".join(f"{number:5} {text}" for number, text in sorted(lines))


def main() -> None:
    """Draw the files and print them."""
    parser = argparse.ArgumentParser(description="Print what a stranger can read of some files.")
    parser.add_argument("--seed", type=int, default=1, help="which files are drawn")
    parser.add_argument("--count", type=int, default=20, help="how many files are drawn")
    args = parser.parse_args()
    files = sorted(ROOT.glob("packages/*/src/**/*.py"))
    for file in random.Random(args.seed).sample(files, args.count):
        sys.stdout.write(f"==== {file.relative_to(ROOT)}\n{reading(file.read_text())}\n\n")


if __name__ == "__main__":
    main()
