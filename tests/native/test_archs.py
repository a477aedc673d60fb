"""Which cards a build has native code for, by the CUDA version that compiled it."""

import pytest


@pytest.mark.parametrize(("cuda_version", "majors"), [(12060, [9]), (12080, [9, 10, 12])])
def test_code_without_ptx(native, cuda_version, majors):
    """nvcc knows 10.0 and 12.0 from 12.8 on: a build of 12.6 must not choose their code there."""
    found = [m for m in range(8, 13) if native.has_code_from_hopper_on(m, cuda_version)]
    assert found == majors
