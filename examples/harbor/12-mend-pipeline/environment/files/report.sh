cd /app
sh select.sh < trains.csv | sh add.sh | sh order.sh > report.txt
