#!/bin/sh
# The Python of Spark's workers in tests. Spark puts its pyspark.zip in front of their path, and modules from a zip file
# are compiled in each process that imports them: a second of processor time for every worker, of which each Spark
# starts ten. The installed package beside the zip is the same and is compiled already.
path=""
IFS=:
for entry in $PYTHONPATH; do
    case "$entry" in
        */pyspark/python/lib/*.zip) ;;
        *) path="$path${path:+:}$entry" ;;
    esac
done
export PYTHONPATH="$path"
exec "$JETSPARK_TESTS_PYTHON" "$@"
