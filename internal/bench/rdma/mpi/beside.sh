#!/bin/sh
# beside.sh: runs the one command that launch.sh hands over, in this container.
read -r command <asked
sh -c "$command"
echo "ended with $?" >ended
