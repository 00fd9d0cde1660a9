"""Define the rules between config keys, in one file for each subject.

A rule is a function with the decorator `relation`. Importing this package imports all its files, so
a new file needs no entry in a list.
"""

from importlib import import_module
from pkgutil import iter_modules

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
