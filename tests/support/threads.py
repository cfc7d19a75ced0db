"""Small tensors: more threads than one only wait for each other, most of all on a busy machine."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="package")
def one_thread():
    """One thread for the length of a folder's tests."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
