"""The field's tools, both ways: our attacks where foolbox, torchattacks, ART, secml-torch or AutoAttack are used, and
theirs inside `ell0.evaluate`. Each module imports its own library: ``from ell0.adapters import foolbox``."""
