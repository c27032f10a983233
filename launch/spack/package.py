# A recipe for Spack 1.0 or newer. It names no address to download from, because fsdpx is not on a package index yet:
# Spack builds the checkout that this file is in.
#
#   spack repo create ~/spack-repos local
#   spack repo add ~/spack-repos/spack_repo/local
#   mkdir ~/spack-repos/spack_repo/local/packages/fsdpx
#   cp launch/spack/package.py ~/spack-repos/spack_repo/local/packages/fsdpx/
#   spack dev-build --source-path "$PWD" fsdpx@0.1.0 ^openmpi      # or ^mpich, ^cray-mpich, your site's MPI
#
# Versions are those of pyproject.toml; tests/launch/test_packages.py compares the two files.

from spack_repo.builtin.build_systems.python import PythonPackage

from spack.package import *


class Fsdpx(PythonPackage):
    """Distributed training for MPI programs: DDP, ZeRO, FSDP, pipeline, tensor and domain parallelism on NumPy and
    CuPy arrays."""

    # the other modules need packages of variants that may be off
    import_modules = ["fsdpx", "fsdpx.nn", "fsdpx.optim"]

    license("Apache-2.0")

    version("0.1.0")

    variant("cuda", default=False, description="Arrays on GPUs; also needs ^py-cupy cuda_arch=...")
    variant("torch", default=False, description="Train modules of PyTorch")
    variant("gloo", default=False, description="Start ranks without MPI, by PyTorch's Gloo")
    variant("plot", default=False, description="Pictures of steps, plans and runs")
    variant("text", default=False, description="Tokenizers and chat templates of pretrained models")
    variant("h5py", default=False, description="Fields in HDF5 and NetCDF files")
    variant("zarr", default=False, description="Fields in Zarr folders")
    variant("tensorboard", default=False, description="Logs for TensorBoard")
    variant("notebook", default=False, description="Start ranks from a notebook")

    depends_on("py-setuptools@77:", type="build")

    with default_args(type=("build", "run")):
        depends_on("python@3.11:")
        depends_on("py-numpy@1.24:")
        depends_on("py-mpi4py@3.1.4:")
        depends_on("py-numba@0.62:")
        depends_on("py-ml-dtypes@0.4:0.5", when="^python@:3.12")
        depends_on("py-ml-dtypes@0.5:", when="^python@3.13:")
        depends_on("py-rich@13:")
        depends_on("py-threadpoolctl@3.1:")

        depends_on("py-cupy@13:+cuda", when="+cuda")
        depends_on("py-torch@2.6:", when="+torch")
        depends_on("py-safetensors@0.4.3:", when="+torch")
        depends_on("py-torch@2.6:+gloo", when="+gloo")
        depends_on("py-matplotlib@3.8:", when="+plot")
        depends_on("py-tokenizers@0.20:", when="+text")
        depends_on("py-jinja2@3.1.6:", when="+text")
        depends_on("py-h5py@3.10:", when="+h5py")
        depends_on("py-zarr@3:", when="+zarr")
        depends_on("py-tensorboardx@2.6:", when="+tensorboard")
        depends_on("py-cloudpickle@3:", when="+notebook")
