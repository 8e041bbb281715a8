"""Algorithms in independent pieces, combined by configuration alone.

rewards ─► length penalty ─► advantage ─────────────┐
log pi, log pi_behaviour ─► correction ─► ratio ────┴─► loss ─► gains
└──► weight ─► × rejection × lag ─► sum over the step / normaliser

base.py         what a piece is: its options, its source, its function; what a package of yours extends
pieces.py       the options of every piece, and `Algorithm`, which combines them; no torch
checks.py       combinations that mean nothing
sampled.py      the tensors that pieces work on
advantages.py   returns.py   lags.py   lengths.py                 on numpy arrays
losses.py   corrections.py   rejections.py   penalties.py         on tensors
metrics.py      what a step tells about itself, by lag
"""
