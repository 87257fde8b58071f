from first import table
