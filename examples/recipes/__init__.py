"""Recipes for real models as YAML files of `treetrain train`; README.md says what each is for."""
