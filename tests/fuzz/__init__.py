"""Fuzz targets: every parser that reads other people's bytes, each as one function of bytes.

``python -m fuzz`` drives them by coverage (atheris); tests/property/test_fuzz_targets.py drives
the same functions by hypothesis. A target returns nothing: it raises for violations.
"""
