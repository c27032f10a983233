# Ranks on this Windows machine, with the mpiexec of MS-MPI.
#
#   launch\mpiexec.ps1 -Ranks 4 train.py --steps 100
param(
    [int]$Ranks = 4,
    [Parameter(Mandatory = $true, Position = 0)][string]$Script,
    [Parameter(ValueFromRemainingArguments = $true)][string[]]$Arguments
)
$ErrorActionPreference = "Stop"

# A rank that came up alone stops with an explanation instead of training a copy.
$env:FSDPX_EXPECT_SIZE = "$Ranks"

# -m mpi4py: a rank that fails ends all of them.
$argv = @("-n", "$Ranks", "python", "-m", "mpi4py", $Script) + @($Arguments)
& mpiexec $argv
exit $LASTEXITCODE
