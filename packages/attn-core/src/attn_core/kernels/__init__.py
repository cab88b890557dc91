"""Operations, the kernels that compute them, and the choice among kernels. One module per operation."""
