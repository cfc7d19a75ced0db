"""Keeps libraries from drawing their own progress bars into ours."""


def quiet_transformers() -> None:
    """No bars for loading and writing weights, for the rest of this process, which is a command of ours."""
    from transformers.utils import logging

    logging.disable_progress_bar()
