"""Jobs of solver ranks and training ranks in which one rank is killed or ends too early."""

import random

import pytest
from coupled import MODES
from kills_bridge import end_unclosed, kill_one
from trials import MPIEXEC


@pytest.mark.jobs
@pytest.mark.skipif(MPIEXEC is None, reason="no mpiexec")
@pytest.mark.parametrize("mode", MODES)
def test_no_job_hangs_when_a_rank_is_killed_or_ends(mode, tmp_path):
    kill_one(tmp_path, mode, random.Random(mode))
    end_unclosed(tmp_path, mode)
