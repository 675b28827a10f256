#!/bin/sh
# launch.sh HOST COMMAND...: what mpirun starts the processes of another host by. Has whoever runs beside.sh do it there, and
# ends when they have.
shift
echo "$*" >asked
read -r status <ended
