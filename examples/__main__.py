"""``python -m examples [names]``: print the share of each script's calls that TVM serves."""

from __future__ import annotations

import sys

from examples.measure import ROWS, measured


def table(names: list[str]) -> bool:
    """Print the rows whose name contains one of ``names``, or all; return whether all pass.

    A row passes if TVM serves 95% of its calls, its results are within their bound, and nothing is
    compiled after the first epoch. A row that ``names`` select fails if a library is missing.
    """
    unknown = [name for name in names if not any(name in row.name for row in ROWS)]
    if unknown:
        print(f"no script has {', '.join(map(repr, unknown))} in its name", file=sys.stderr)
    right = not unknown
    print("| script | calls | served by TVM | results | largest relative difference |")
    print("|---|---|---|---|---|")
    for row in ROWS:
        if names and not any(name in row.name for name in names):
            continue
        found = measured(row)
        if found.missing:
            print(f"| `{row.name}` | not run: {found.missing} | | | |", flush=True)
            right = right and not names
            continue
        cells = f"{found.calls} | {found.share:.0%} | {found.results} | {found.difference:.0e}"
        print(f"| `{row.name}` | {cells} |", flush=True)
        for reason in found.reasons:
            print(f"not served: {reason}", file=sys.stderr)
        if found.later:
            print(f"compiled after the first epoch: {found.later}", file=sys.stderr)
        right = right and found.share >= 0.95 and found.difference <= row.bound and not found.later
    return right


if __name__ == "__main__":
    sys.exit(0 if table(sys.argv[1:]) else 1)
