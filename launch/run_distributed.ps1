# Ranks on this Windows machine, with the mpiexec of MS-MPI or Intel MPI: all else is `fsdpx run`.
#
#   launch\run_distributed.ps1 -n 4 train.py --steps 100
#   launch\run_distributed.ps1 -n 8 --hostfile hosts.txt -m mypackage.train
#
# It declares no parameters: PowerShell would take -m for the beginning of the name of one. All words are in $args.
$ErrorActionPreference = "Stop"

if ($args.Count -eq 0) {
    [Console]::Error.WriteLine("usage: run_distributed.ps1 -n RANKS [options of fsdpx run] script.py [arguments]")
    exit 2
}

& python -m fsdpx run @args
exit $LASTEXITCODE
