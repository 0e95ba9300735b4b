#!/bin/sh
# The Python of Spark's workers in tests. Spark puts its pyspark.zip in front of their path, and modules from a zip file
# are compiled in each process that imports them: a second of processor time for every worker, of which each Spark
# starts ten. The installed package beside the zip is the same and is compiled already. What Spark runs as a module is
# forked from a process that has imported it (`spark_python.py`), where there is one.
path=""
IFS=:
for entry in $PYTHONPATH; do
    case "$entry" in
        */pyspark/python/lib/*.zip) ;;
        *) path="$path${path:+:}$entry" ;;
    esac
done
export PYTHONPATH="$path"
if [ -n "$JETSPARK_TESTS_WORKERS" ] && [ "$1" = "-m" ]; then
    exec "$JETSPARK_TESTS_PYTHON" -I -S "${0%/*}/worker_client.py" "$@"
fi
exec "$JETSPARK_TESTS_PYTHON" "$@"
