# Ranks on this Windows machine, with the mpiexec of MS-MPI or Intel MPI: all else is `fsdpx run`.
#
#   launch\run_distributed.ps1 -Ranks 4 train.py --steps 100
#   launch\run_distributed.ps1 -Ranks 8 -Hostfile hosts.txt train.py
param(
    [int]$Ranks = 4,
    [string]$Hostfile = "",
    [string]$Mpiexec = "",
    [Parameter(Mandatory = $true, Position = 0)][string]$Script,
    [Parameter(ValueFromRemainingArguments = $true)][string[]]$Arguments
)
$ErrorActionPreference = "Stop"

$options = @("-n", "$Ranks")
if ($Hostfile) { $options += @("--hostfile", $Hostfile) }
if ($Mpiexec) { $options += @("--mpiexec", $Mpiexec) }

& python -m fsdpx run $options $Script $Arguments
exit $LASTEXITCODE
