/* Passes a megabyte round all processes of an MPI job, and says what came back. MPI's functions are
 * declared here, so that the library alone is needed. */
#include <stdio.h>

#define SIZE (1 << 20)

extern int MPI_Init(int *argc, char ***argv), MPI_Finalize(void);
extern int MPI_Comm_rank(void *comm, int *rank), MPI_Comm_size(void *comm, int *size);
extern int MPI_Send(const void *data, int n, void *type, int to, int tag, void *comm);
extern int MPI_Recv(void *data, int n, void *type, int from, int tag, void *comm, void *status);
extern char ompi_mpi_comm_world[], ompi_mpi_byte[]; /* MPI_COMM_WORLD, MPI_BYTE */

static unsigned char data[SIZE];

int main(int argc, char **argv)
{
	void *all = ompi_mpi_comm_world, *byte = ompi_mpi_byte;
	int rank, size, i;

	MPI_Init(&argc, &argv);
	MPI_Comm_rank(all, &rank);
	MPI_Comm_size(all, &size);
	for (i = 0; rank == 0 && i < SIZE; i++)
		data[i] = i * 7;
	if (rank > 0)
		MPI_Recv(data, SIZE, byte, rank - 1, 1, all, NULL);
	MPI_Send(data, SIZE, byte, (rank + 1) % size, 1, all);
	if (rank == 0) {
		MPI_Recv(data, SIZE, byte, size - 1, 1, all, NULL);
		for (i = 0; i < SIZE && data[i] == (unsigned char)(i * 7); i++)
			;
		printf("ring of %d: %d bytes\n", size, i);
	}
	return MPI_Finalize();
}
