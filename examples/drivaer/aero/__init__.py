"""Aerodynamics of cars with Transolver: what `train.py`, `evaluate.py`, `k_fold.py` and `demo.py` share."""
