"""``python -m tierzero``, and so ``torchrun -m tierzero``."""

from __future__ import annotations

from .cli import main

if __name__ == "__main__":
    main()
