! One step of the heat equation on this rank's part of a field, u, with a layer of ghost cells around it.
! gfortran -O2 -shared -fPIC -o heat.so heat.f90
subroutine advance(nx, ny, factor, u) bind(C)
  use, intrinsic :: iso_c_binding, only: c_int, c_double
  implicit none
  integer(c_int), value :: nx, ny
  real(c_double), value :: factor
  real(c_double), intent(inout) :: u(0:nx + 1, 0:ny + 1)

  u(1:nx, 1:ny) = u(1:nx, 1:ny) + factor*(u(0:nx - 1, 1:ny) + u(2:nx + 1, 1:ny) &
    + u(1:nx, 0:ny - 1) + u(1:nx, 2:ny + 1) - 4*u(1:nx, 1:ny))
end subroutine
