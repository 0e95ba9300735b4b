"""How well the tree keeps to itself: accesses to the private names of other objects, class names used twice, and how
many lines of the two drivers, methods of a class and lines of a function are written by hand.

``python tools/house.py`` prints the figures of each package. ``tests/unit/test_house.py`` holds the bounds, which only
ever get smaller.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "src" / "jetspark"
# Of the same thing, once for each driver.
DRIVER_PAIRS = (("aio", "blocking"), ("batcher/aio", "batcher/blocking"))


def foreign_accesses(tree: ast.AST) -> list[ast.Attribute]:
    """``other._name``: reading or writing a private attribute through anything but ``self``, ``cls`` or ``super()``."""
    return [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
        and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
        and not (isinstance(node.value, ast.Call) and ast.unparse(node.value.func) == "super")
    ]


def accesses_per_1000_lines(*packages: str) -> float:
    lines = accesses = 0
    for package in packages:
        for module in sorted((SOURCE / package).rglob("*.py")):
            text = module.read_text(encoding="utf-8")
            lines += text.count("\n")
            accesses += len(foreign_accesses(ast.parse(text)))
    return 1000 * accesses / lines


def shared_class_names() -> dict[str, list[str]]:
    """Class names that are defined in more than one module, twins of the two drivers aside."""
    homes: dict[str, set[str]] = defaultdict(set)
    for module in sorted(SOURCE.rglob("*.py")):
        home = module.relative_to(SOURCE).as_posix()
        for one, other in DRIVER_PAIRS:
            home = home.replace(f"{other}/", f"{one}/", 1) if home.startswith(f"{other}/") else home
        for node in ast.parse(module.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                homes[node.name].add(home)
    return {name: sorted(where) for name, where in sorted(homes.items()) if len(where) > 1}


def hand_written_lines(*packages: str) -> int:
    """All lines, comments and blank ones included, of the modules that no tool writes."""
    texts = [module.read_text(encoding="utf-8") for name in packages for module in (SOURCE / name).rglob("*.py")]
    return sum(text.count("\n") for text in texts if not text.startswith("# Generated from "))


def largest_classes(count: int) -> list[tuple[int, str, str]]:
    """Classes by the number of methods that they define themselves: that number, the class, and its module."""
    found = []
    for module in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                methods = sum(isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) for each in node.body)
                found.append((methods, node.name, module.relative_to(SOURCE).as_posix()))
    return sorted(found, reverse=True)[:count]


def longest_functions(count: int) -> list[tuple[int, str, str]]:
    """Functions by their lines below the first: that number, the function, and its module."""
    found = []
    for module in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno
                found.append((lines, node.name, module.relative_to(SOURCE).as_posix()))
    return sorted(found, reverse=True)[:count]


def main() -> None:
    print("accesses to foreign private names in 1000 lines")
    for package in sorted(path.name for path in SOURCE.iterdir() if (path / "__init__.py").exists()):
        print(f"  {package:12} {accesses_per_1000_lines(package):5.1f}")
    print(f"  both drivers {accesses_per_1000_lines('aio', 'blocking'):5.1f}")
    print(f"lines of both drivers written by hand: {hand_written_lines('aio', 'blocking')}")
    print("largest classes, by methods")
    for methods, name, module in largest_classes(10):
        print(f"  {methods:3} {name:22} {module}")
    print("longest functions, by lines")
    for lines, name, module in longest_functions(10):
        print(f"  {lines:3} {name:22} {module}")
    shared = shared_class_names()
    print(f"class names with more than one home: {len(shared)}")
    for name, homes in shared.items():
        print(f"  {name:20} {', '.join(homes)}")


if __name__ == "__main__":
    main()
