from swaleak.cli import main

main()
