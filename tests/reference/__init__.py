"""Independent reference of what an eviction must do.

Nothing here shares code with the library: the models are written by :mod:`reference.models`, evaluated with NumPy by
:mod:`reference.forward`, the kept rows are selected by :mod:`reference.policies`, and :mod:`reference.driver` talks to
the C API through its own ctypes declarations.
"""
